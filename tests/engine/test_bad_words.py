"""A bad word's tokens, by both kinds of tokenizer, and outputs that do not hold it."""

import itertools

import pytest

from configs.sampling import SamplingParams
from configs.settings import EngineConfig
from engine.input_processor import InputProcessor
from engine.llm import LLM
from engine.text.word_tokens import word_tokens
from tests.engine.tiny_models import write_tiny
from tests.engine.tiny_tokenizers import (
    as_tokenizer,
    byte_level_vocabulary,
    sentencepiece_model,
    sentencepiece_vocabulary,
)


@pytest.fixture(scope="module", params=["byte-level", "SentencePiece", "SentencePiece without a space before texts"])
def tokenizer(request):
    if request.param == "byte-level":
        return as_tokenizer(byte_level_vocabulary())
    space = request.param == "SentencePiece"
    return as_tokenizer(sentencepiece_vocabulary(sentencepiece_model(), add_space_prefix=space))


WORDS = ["sea", "she", "dog", "world", "Hello", "tokenizer", "xyzzy", "élève", "sea shells", "日本", "sea,", "\n"]


@pytest.mark.parametrize("word", WORDS)
def test_both_forms_are_among_the_tokens(tokenizer, word):
    found = word_tokens(tokenizer, word)
    texts = {b"".join(map(tokenizer.token_bytes, token_ids)) for token_ids in found}
    assert texts == {word.encode(), b" " + word.encode()}
    assert found == word_tokens(tokenizer, " " + word)


@pytest.mark.parametrize("word", WORDS[:9])
@pytest.mark.parametrize(("before", "after"), [*itertools.product(["", "the ", "a. ", "a\n", "(", "1"], ["", " and"])])
def test_what_an_encoder_writes_holds_one_of_them(tokenizer, word, before, after):
    token_ids = tokenizer.encode(before + word + after, add_special_tokens=False)
    found = word_tokens(tokenizer, word)
    assert any(tuple(token_ids[i : i + len(each)]) == each for each in found for i in range(len(token_ids)))


def test_a_special_token_is_a_word(tokenizer):
    token = tokenizer.special_tokens["eos_token"]
    assert (tokenizer.eos_token_id,) in word_tokens(tokenizer, token)


def test_words_become_sequences_once(tmp_path):
    write_tiny(tmp_path)
    inputs = InputProcessor(EngineConfig(model=str(tmp_path)))
    plain = SamplingParams()
    assert inputs.prepare(plain) is plain
    prepared = inputs.prepare(SamplingParams(bad_words=("ab", " ab"), bad_sequences=((1,),), seed=3))
    ids = tuple(inputs.encode("ab", add_special_tokens=False))
    space = tuple(inputs.encode(" ", add_special_tokens=False))
    assert (prepared.bad_words, prepared.seed) == ((), 3)
    assert prepared.bad_sequences[0] == (1,)
    assert set(prepared.bad_sequences[1:]) == {ids, space + ids}
    assert len(prepared.bad_sequences) == 3


def test_outputs_do_not_hold_bad_words(smollm2_path):
    llm = LLM(str(smollm2_path), dtype="float32", kv_cache_tokens=1024, max_num_seqs=4)
    prompt = "Paris is the capital of"
    free = SamplingParams(temperature=0, max_tokens=12)
    [before] = llm.generate(prompt, free)
    words = [word for word in before.outputs[0].text.replace(".", " ").split() if word.isalpha()]
    assert len(words) > 3
    bound = SamplingParams(temperature=0, max_tokens=12, bad_words=tuple(words), n=2)
    [request] = llm.generate(prompt, bound)
    for output in request.outputs:
        assert not set(output.text.split()) & set(words), (words, output.text)
