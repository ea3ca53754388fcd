"""The budget of a reasoning part: the closing marker is forced when it is spent, and not before."""

import random
import re
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pytest
from tiny_tokenizers import as_tokenizer, byte_level_vocabulary, sentencepiece_model, sentencepiece_vocabulary
from tokenizers import Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from configs.errors import InvalidRequest
from configs.sampling import Reasoning, SamplingParams, ThinkingBudget
from engine.checkpoints import open_checkpoint
from engine.input_processor import InputProcessor
from engine.llm import LLM
from engine.text.tokenizer import Tokenizer, load_tokenizer
from engine.thinking import Thinking
from server.answers.parser import AnswerParser
from server.answers.styles import THINK
from tests.conftest import SMOLLM2
from tests.engine.tiny_models import write_tiny

SENTENCES = [
    "<think>\nLet me see: 6 * 7 = 42.\n</think>\n\nThe answer is <b>42</b>.\n",
    "<think>\n\n</think>\n\nYes; x <y> and z.\n\n",
    "<think>Well,</think>No>\n\n<<think",
]


def llama_like() -> Tokenizer:
    """A vocabulary that joins punctuation with the line breaks behind it, as those of Llama 3 and Qwen 2 do."""
    split = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s+"
    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        SENTENCES * 3, BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return Tokenizer(backend, {})


def with_special_markers() -> Tokenizer:
    tokenizer = llama_like()
    tokenizer._backend.add_special_tokens(["<think>", "</think>"])
    return Tokenizer(tokenizer._backend, {})


def inputs_of(tokenizer: Tokenizer) -> InputProcessor:
    inputs = InputProcessor.__new__(InputProcessor)
    inputs.tokenizer, inputs._parts_of = tokenizer, lru_cache(inputs._find_parts)
    return inputs


TOKENIZERS = {
    "smollm2": lambda: load_tokenizer(open_checkpoint(SMOLLM2)),
    "llama": llama_like,
    "special": with_special_markers,
    "sentencepiece": lambda: as_tokenizer(sentencepiece_vocabulary(sentencepiece_model())),
    "byte-level": lambda: as_tokenizer(byte_level_vocabulary()),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def inputs(request: pytest.FixtureRequest) -> InputProcessor:
    if request.param == "smollm2" and not SMOLLM2.is_file():
        pytest.skip(f"{SMOLLM2} is not there")
    return inputs_of(TOKENIZERS[request.param]())


TEXTS = [
    "<think>hm</think>yes",
    "<think>\nhm\n</think>\n\nyes",
    "\n <think>\n\n</think>yes",
    "<think></think>",
    "<think>\n</thin</think>>\n\n",
    "<think>a </ think> b </think x </think>",
    "<think><think>x</think>y</think>",
    "yes <think>no</think>",
    "<thin",
    "< think>no</think>",
    "<think>never ends",
    "",
]


def cut(tokenizer: Tokenizer, text: str, seed: int) -> list[int]:
    """Token ids of a text: by its encoder, of single characters, or of pieces that are cut at random."""
    chance = random.Random(seed)
    places = [i for i in range(1, len(text)) if seed == 1 or (seed > 1 and chance.random() < 0.4)]
    pieces = [text[a:b] for a, b in pairwise([0, *places, len(text)])]
    return [token_id for piece in pieces for token_id in tokenizer.encode(piece, add_special_tokens=False)]


def written(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")


def is_inside(text: str, starts_inside: bool) -> bool:
    """By the definition: the part is at the text's beginning or nowhere."""
    opened = re.match(r"" if starts_inside else r"\s*<think>", text)
    return opened is not None and "</think>" not in text[opened.end() :]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("starts_inside", [False, True])
def test_the_part_is_found_however_it_is_cut_into_tokens(
    inputs: InputProcessor, text: str, starts_inside: bool
) -> None:
    text = text.replace("<think>", "", 1) if starts_inside else text
    markers = Reasoning("</think>", "" if starts_inside else "<think>")
    for seed in range(10):
        thinking = Thinking(inputs.thinking_budget(0, markers, "</think>"))
        ids = cut(inputs.tokenizer, text, seed)
        for count in range(len(ids) + 1):
            so_far = written(inputs.tokenizer, ids[:count])
            assert (thinking.forced_id is not None) == is_inside(so_far, starts_inside), so_far
            if count < len(ids):
                thinking.append(ids[count])


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("end", ["</think>", "</think>\n\n"])
@pytest.mark.parametrize("starts_inside", [False, True])
def test_the_end_is_forced_in_time_and_as_it_is_written(
    inputs: InputProcessor, budget: int, end: str, starts_inside: bool
) -> None:
    tokenizer = inputs.tokenizer
    opening = "" if starts_inside else "<think>"
    for text in (f"{opening}\nso, x and y and z and so on", f"{opening} so"):
        for seed in range(6):
            thinking = Thinking(inputs.thinking_budget(budget, Reasoning("</think>", opening), end))
            ids: list[int] = []
            natural = [*cut(tokenizer, text, seed), *tokenizer.encode(" yes" * 9, add_special_tokens=False)]
            for token_id in natural:
                while (forced := thinking.forced_id) is not None:
                    ids.append(forced)
                    thinking.append(forced)
                ids.append(token_id)
                thinking.append(token_id)
            answer = AnswerParser(THINK, starts_inside=starts_inside).parse(written(tokenizer, ids))
            assert "</think>" not in answer.content
            assert answer.content.rstrip().endswith("yes")
            if is_inside(written(tokenizer, natural), starts_inside):
                inside = written(tokenizer, ids).partition("<think>")[2 if opening else 0].partition("</think>")[0]
                assert len(inside) <= budget * max(len(tokenizer.token_bytes(token_id)) for token_id in natural) + 2


def test_what_ends_by_itself_is_left_alone(inputs: InputProcessor) -> None:
    for text in ("<think>so</think>\n\nyes, <think> it is", "<think>\nso it is\n</think>\n\nyes"):
        ids = cut(inputs.tokenizer, text, 0)
        thinking = Thinking(inputs.thinking_budget(len(ids), Reasoning("</think>", "<think>"), "</think>\n\n"))
        for token_id in ids:
            assert thinking.forced_id is None
            thinking.append(token_id)
        assert thinking.forced_id is None


def test_an_answer_without_a_part_has_no_bound(inputs: InputProcessor) -> None:
    for text in ("Use <think> tags", "yes", "thinking <think>x"):
        thinking = Thinking(inputs.thinking_budget(0, Reasoning("</think>", "<think>"), "</think>"))
        for token_id in cut(inputs.tokenizer, text, 0):
            thinking.append(token_id)
            assert thinking.forced_id is None


def test_ids_without_a_text_are_found_as_ids() -> None:
    thinking = Thinking(ThinkingBudget(2, (7, 8)))
    forced = []
    for token_id in (1, 2, None, None, 3):
        forced.append(thinking.forced_id)
        thinking.append(forced[-1] if token_id is None else token_id)
    assert forced == [None, None, 7, 8, None]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reasoning_ends_in_time(tmp_path: Path, temperature: float) -> None:
    write_tiny(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", kv_cache_tokens=1024, num_threads=1)
    end = tuple(llm.tokenizer.encode("</t>"))
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=30, ignore_eos=True, thinking=ThinkingBudget(7, end)
    )
    [request] = llm.generate("Hello", params)
    free = llm.generate("Hello", SamplingParams(temperature=temperature, seed=1, max_tokens=30, ignore_eos=True))[0]
    ids = request.outputs[0].token_ids
    assert ids[:7] == free.outputs[0].token_ids[:7]
    assert tuple(ids[7:11]) == end
    assert len(ids) == 30


@pytest.mark.parametrize("budget", [ThinkingBudget(-1, (1,)), ThinkingBudget(1, ())])
def test_budgets_that_cannot_be(budget: ThinkingBudget) -> None:
    with pytest.raises(InvalidRequest):
        SamplingParams(thinking=budget)


@pytest.mark.parametrize("budget", [ThinkingBudget(1, (10**6,)), ThinkingBudget(1, (5,), (-1,))])
def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path, budget: ThinkingBudget) -> None:
    write_tiny(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", kv_cache_tokens=1024, num_threads=1)
    with pytest.raises(InvalidRequest, match="thinking must be token ids between"):
        llm.generate("Hello", SamplingParams(thinking=budget))
