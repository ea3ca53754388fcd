"""The real server with a tiny SentencePiece checkpoint, against transformers: its text, and scores of prompts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaTokenizer, PreTrainedModel

from engine.text.gguf_vocab import merges_from_scores
from tests.engine.tiny_models import tiny_model
from tests.engine.tiny_tokenizers import SENTENCES, sentencepiece_model, sentencepiece_vocabulary
from tests.server.test_live_server import LiveServer, live_server

VOCABULARY = sentencepiece_vocabulary(sentencepiece_model())
IDS = {token: token_id for token_id, token in enumerate(VOCABULARY.tokens)}
NUM_TOKENS = len(IDS)
PADDED_ID = NUM_TOKENS + 40
OTHER_END = IDS["▁the"]
NO_BYTES = {token_id: -100.0 for token, token_id in IDS.items() if token.startswith("<")}
"""A bias that leaves whole words: of runs of bytes that are not UTF-8 transformers shows less."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sentencepiece")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    model = tiny_model(vocab_size=NUM_TOKENS + 64)
    model.save_pretrained(folder)
    defaults = {"temperature": 0.1, "top_k": 1, "eos_token_id": [2, OTHER_END]}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    return model


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    tokenizer = LlamaTokenizer(vocab=IDS, merges=merges_from_scores(VOCABULARY))
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module")
def server(folder: Path, model: PreTrainedModel, tokenizer: Any) -> Iterator[LiveServer]:
    with live_server(folder / "log", model=str(folder)) as running:
        running.wait_ready()
        yield running


def both(server: LiveServer, **fields: Any) -> dict[str, Any]:
    """A choice, whole; its stream says the same."""
    choice = server.post(**fields, return_token_ids=True)["choices"][0]
    chunks = server.stream(**fields)
    assert "".join(one["text"] for chunk in chunks for one in chunk["choices"]) == choice["text"]
    return dict(choice)


@pytest.mark.parametrize("number", range(4))
def test_text_is_what_the_output_adds_to_the_prompt(server: LiveServer, tokenizer: Any, number: int) -> None:
    choice = both(server, prompt=SENTENCES[number], logit_bias=NO_BYTES, max_tokens=60, ignore_eos=True)
    prompt, output = choice["prompt_token_ids"], choice["token_ids"]
    assert prompt == tokenizer.encode(SENTENCES[number])
    whole, before = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt + output, prompt))
    assert choice["text"] == whole.removeprefix(before)
    assert choice["text"].count(" ") > 5


def test_a_lone_space_is_kept(server: LiveServer, tokenizer: Any) -> None:
    space, word = IDS["▁"], OTHER_END
    assert both(server, prompt="The dog", logit_bias={space: 100}, max_tokens=3)["text"] == "   "
    prompt = [*tokenizer.encode("The dog"), space]
    choice = both(server, prompt=prompt, logit_bias={word: 100}, max_tokens=2, echo=True, ignore_eos=True)
    assert choice["text"] == "The dog  the the" == tokenizer.decode([*prompt, word, word], skip_special_tokens=True)


@pytest.mark.parametrize("text", ["한국어", "😀 👨‍👩‍👧‍👦", "<0xEA> is text", "It is 12. Is it?  Yes.\n\n\tNo."])
def test_bytes_become_characters_and_their_spelling_stays_text(server: LiveServer, tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(f"a {text}")
    choice = both(server, prompt=ids, echo=True, max_tokens=1, logit_bias={OTHER_END: 100}, ignore_eos=True)
    assert choice["text"] == f"a {text} the"


@pytest.mark.parametrize("seed", range(3))
def test_bytes_in_any_order_can_be_shown(server: LiveServer, seed: int) -> None:
    choice = both(server, prompt="The", temperature=2.0, top_k=0, seed=seed, max_tokens=150, ignore_eos=True)
    assert len(choice["token_ids"]) == 150


def test_the_checkpoints_sampling_fills_only_what_a_request_leaves_out(server: LiveServer) -> None:
    assert "temperature 0.1, top_k 1" in server.log.read_text()
    greedy = server.post(prompt="The dog")["choices"]
    assert server.post(prompt="The dog", temperature=2.0, seed=1)["choices"] == greedy, "top_k is the checkpoint's"
    assert server.post(prompt="The dog", temperature=None)["choices"] == greedy
    assert server.post(prompt="The dog", temperature=2.0, seed=1, top_k=-1)["choices"] != greedy


def test_all_of_the_checkpoints_ends_can_be_ignored(server: LiveServer) -> None:
    fields = {"prompt": "The dog", "logit_bias": {OTHER_END: 100}, "max_tokens": 5}
    ended = server.post(**fields)
    assert (ended["choices"][0]["finish_reason"], ended["usage"]["completion_tokens"]) == ("stop", 1)
    assert server.post(**fields, ignore_eos=True)["choices"][0]["text"] == " the" * 5
    own = server.post(**fields, ignore_eos=True, stop_token_ids=[OTHER_END])
    assert (own["choices"][0]["stop_reason"], own["usage"]["completion_tokens"]) == (OTHER_END, 1)


def test_ids_without_a_token_are_empty(server: LiveServer) -> None:
    fields = {"prompt": "The dog", "logit_bias": {PADDED_ID: 100}, "max_tokens": 4}
    assert both(server, **fields, skip_special_tokens=False)["text"] == ""
    answer = server.post(**fields, logprobs=1)
    assert answer["choices"][0]["logprobs"]["tokens"] == [""] * 4
    assert answer["usage"]["completion_tokens"] == 4


def expected_logprobs(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """[tokens - 1, vocabulary]: of each id but the first."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("as_ids", [True, False])
@pytest.mark.parametrize("streamed", [True, False])
def test_scores_of_prompts_equal_transformers(
    server: LiveServer, model: PreTrainedModel, tokenizer: Any, max_tokens: int, as_ids: bool, streamed: bool
) -> None:
    """Several prompts with echo, as evaluations of multiple choices send them."""
    prompts = [tokenizer.encode(text) for text in SENTENCES[:4]]
    sent = prompts if as_ids else SENTENCES[:4]
    fields = {"prompt": sent, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "ignore_eos": True}
    if streamed:
        pieces = [choice for chunk in server.stream(**fields) for choice in chunk["choices"]]
        logprobs = [joined([p["logprobs"] for p in pieces if p["index"] == i and p["logprobs"]]) for i in range(4)]
    else:
        answer = server.post(**fields)
        logprobs = [choice["logprobs"] for choice in answer["choices"]]
        assert answer["usage"]["completion_tokens"] == max_tokens * 4
        assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    for ids, found in zip(prompts, logprobs, strict=True):
        expected = expected_logprobs(model, ids)
        chosen = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        assert all(len(values) == len(ids) + max_tokens for values in found.values())
        assert found["token_logprobs"][0] is None
        assert found["token_logprobs"][1 : len(ids)] == pytest.approx(chosen, abs=1e-3)
        likeliest = [max(top.values()) for top in found["top_logprobs"][1 : len(ids)]]
        assert likeliest == pytest.approx(expected.max(1).values.tolist(), abs=1e-3)


def joined(parts: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def test_logprobs_of_a_prompt_are_the_same_alone_and_among_others(server: LiveServer) -> None:
    fields = {"logprobs": 3, "max_tokens": 8, "echo": True}
    alone = [server.post(prompt=[text], **fields)["choices"][0]["logprobs"] for text in SENTENCES[:3]]
    together = server.post(prompt=SENTENCES[:3], **fields)["choices"]
    assert [choice["logprobs"] for choice in together] == alone


def test_prompt_logprobs_name_every_token(server: LiveServer, model: PreTrainedModel, tokenizer: Any) -> None:
    ids = tokenizer.encode(SENTENCES[0])
    [choice] = server.post(prompt=ids, prompt_logprobs=1, max_tokens=1)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    chosen = expected_logprobs(model, ids).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert [entry[str(token_id)]["logprob"] for entry, token_id in zip(rest, ids[1:], strict=True)] == pytest.approx(
        chosen, abs=1e-3
    )


def test_offsets_count_from_the_start_of_the_answers_text(server: LiveServer) -> None:
    """Of the completion, and with echo of the prompt; streamed as whole."""
    for echo in (False, True):
        fields = {"prompt": [5, 300, 301, 302], "logit_bias": NO_BYTES, "logprobs": 0, "echo": echo, "max_tokens": 12}
        whole = server.post(**fields)["choices"][0]["logprobs"]
        pieces = [one["logprobs"] for chunk in server.stream(**fields) for one in chunk["choices"] if one["logprobs"]]
        assert joined(pieces) == whole
        lengths = [len(token) for token in whole["tokens"]]
        assert whole["text_offset"] == [sum(lengths[:position]) for position in range(len(lengths))]


@pytest.mark.parametrize("count", [-1, 21, NUM_TOKENS + 64, 1000])
@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_no_more_logprobs_than_twenty(server: LiveServer, name: str, count: int) -> None:
    for allowed in (5, 10, 20):
        server.post(prompt="The dog", max_tokens=1, **{name: allowed})
    body = json.dumps({"prompt": [5] * 200, name: count})
    response = httpx.post(f"{server.url}/v1/completions", content=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)
