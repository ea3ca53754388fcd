"""Text of the real server with the bundled checkpoint: characters of several tokens, stops, special tokens, echo.

The oracle is the `tokenizers` library on the ids that the server reports, and the bytes of its vocabulary.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import httpx
import pytest

from engine.checkpoints import open_checkpoint
from engine.text.tokenizer import load_tokenizer
from tests.server.test_live_server import LiveServer, live_server

IM_START = 1
BROKEN = "\ufffd"
REPEATED = {
    "emoji": "🦄 🐉 🧿 " * 6,
    "thai": "ภาษาไทย " * 8,
    "han": "龘靐 " * 8,
    "quotes": "“yes” and ‘no’, “yes” and ‘no’, “yes” and",
    "spaces": "a\tb\n\tc 😀\n" * 3 + "a\tb\n",
    "words": "Once upon a time, in a village by the sea, there lived",
}
"""The model goes on with characters of the same kind, which its vocabulary cuts in pieces."""
ALL_KINDS = pytest.mark.parametrize("kind", REPEATED)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("text") / "log") as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def decode(smollm2_path: Any) -> Callable[..., str]:
    """(ids, skip_special_tokens) -> text, by the library."""
    backend = load_tokenizer(open_checkpoint(smollm2_path))._backend
    return lambda ids, skip=True: str(backend.decode(ids, skip_special_tokens=skip))


@pytest.fixture(scope="module")
def raw_bytes(smollm2_path: Any) -> Callable[[int], bytes]:
    """The bytes of an ordinary token, from its spelling in the vocabulary and GPT-2's published alphabet."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    backend = load_tokenizer(open_checkpoint(smollm2_path))._backend
    alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
    return lambda token_id: bytes(alphabet[character] for character in backend.id_to_token(token_id))


def pieces(chunks: list[dict[str, Any]], name: str) -> list[Any]:
    return [choice[name] for chunk in chunks for choice in chunk["choices"] if choice.get(name)]


def chat(server: LiveServer, **fields: Any) -> dict[str, Any]:
    body = {"temperature": 0, "max_tokens": 24, **fields}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return dict(response.json())


def continued(text: str, *, as_parts: bool = False) -> dict[str, Any]:
    """A chat whose answer goes on from `text`."""
    content: Any = [{"type": "text", "text": text}] if as_parts else text
    messages = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": content}]
    return {"messages": messages, "continue_final_message": True}


@ALL_KINDS
def test_characters_of_several_tokens_arrive_whole(server: LiveServer, decode: Callable[..., str], kind: str) -> None:
    fields = {"prompt": REPEATED[kind], "max_tokens": 30, "return_token_ids": True}
    whole = server.post(**fields, logprobs=3)["choices"][0]
    chunks = server.stream(**fields)
    texts, ids = pieces(chunks, "text"), list(chain(*pieces(chunks, "token_ids")))
    assert ids == whole["token_ids"]
    assert "".join(texts) == whole["text"] == decode(ids)
    assert BROKEN not in "".join(texts[:-1])
    assert BROKEN not in texts[-1][:-1], "only the limit may cut a character"
    seen = [
        *texts,
        *whole["logprobs"]["tokens"],
        *(token for top in whole["logprobs"]["top_logprobs"] for token in top),
    ]
    assert not set("".join(seen)) & set("ĠĊĉðŁâĢ▁"), "spellings of the vocabulary"


@ALL_KINDS
def test_logprobs_hold_the_bytes_of_each_token(
    server: LiveServer, raw_bytes: Callable[[int], bytes], kind: str
) -> None:
    fields = {**continued(REPEATED[kind]), "logprobs": True, "top_logprobs": 5, "ignore_eos": True, "max_tokens": 16}
    choice = chat(server, **fields)["choices"][0]
    by_id = chat(server, **fields, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]["content"]
    joined = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert joined.decode(errors="replace") == choice["message"]["content"]
    for entry, named in zip(choice["logprobs"]["content"], by_id, strict=True):
        assert len(entry["top_logprobs"]) == 5
        for one, same in zip([entry, *entry["top_logprobs"]], [named, *named["top_logprobs"]], strict=True):
            token_id = int(same["token"].removeprefix("token_id:"))
            if token_id > 16:  # the vocabulary begins with its special tokens
                assert bytes(one["bytes"]) == bytes(same["bytes"]) == raw_bytes(token_id)
            assert one["token"] == bytes(one["bytes"]).decode(errors="replace") != ""


def test_a_leading_space_is_kept(server: LiveServer) -> None:
    whole = server.post(prompt="The capital of France is", max_tokens=3)["choices"][0]["text"]
    assert whole.startswith(" Paris")
    assert "".join(pieces(server.stream(prompt="The capital of France is", max_tokens=3), "text")) == whole


@pytest.mark.parametrize("seed", range(2))
def test_what_is_drawn_from_a_flat_distribution_can_be_shown(
    server: LiveServer, decode: Callable[..., str], seed: int
) -> None:
    prompt = random.Random(seed).sample(range(17, 49152), 20)
    fields = {"prompt": prompt, "temperature": 2.0, "seed": seed, "n": 8, "max_tokens": 40, "ignore_eos": True}
    *chunks, last = server.stream(**fields, return_token_ids=True, stream_options={"include_usage": True})
    assert last["usage"]["completion_tokens"] == 8 * 40
    for index in range(8):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        ids = list(chain(*(choice.get("token_ids", []) for choice in choices)))
        assert len(ids) == 40
        assert "".join(choice["text"] for choice in choices).lstrip(BROKEN) == decode(ids).lstrip(BROKEN)


def test_special_tokens_are_hidden_unless_asked_for(server: LiveServer) -> None:
    fields = {"prompt": "Hello", "logit_bias": {IM_START: 100}, "max_tokens": 5}
    hidden, shown = server.post(**fields), server.post(**fields, skip_special_tokens=False)
    assert hidden["choices"][0]["text"] == ""
    assert shown["choices"][0]["text"] == "<|im_start|>" * 5
    assert hidden["usage"] == shown["usage"]
    assert "".join(pieces(server.stream(**fields, skip_special_tokens=False), "text")) == "<|im_start|>" * 5


def test_an_echoed_prompt_keeps_its_spaces_and_apostrophes(server: LiveServer) -> None:
    text = " 'manual' , it 's  .\tdon 't\n"
    ids = server.post(prompt=text, max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    alone = server.post(prompt=text, max_tokens=4)["choices"][0]["text"]
    for prompt in (text, ids, [ids, ids]):
        fields = {"prompt": prompt, "echo": True, "max_tokens": 4}
        choices = server.post(**fields)["choices"]
        assert [choice["text"] for choice in choices] == [text + alone] * len(choices)
        chunks = server.stream(**fields)
        for choice in choices:
            mine = [c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
            assert "".join(mine) == choice["text"]


def test_a_stop_string_inside_a_token_ends_with_that_token(server: LiveServer) -> None:
    """The first two characters of a token's text: completion tokens count the one that holds them."""
    free = server.post(prompt=REPEATED["words"], return_token_ids=True, logprobs=0)
    text, tokens = free["choices"][0]["text"], free["choices"][0]["logprobs"]["tokens"]
    tried = 0
    for position, token in enumerate(tokens):
        stop, before = token[:2], "".join(tokens[:position])
        if len(token) < 3 or text.find(stop) != len(before):
            continue
        tried += 1
        if tried > 6:
            break
        cut = server.post(prompt=REPEATED["words"], stop=stop)
        assert cut["choices"][0]["text"] == before
        assert cut["choices"][0]["finish_reason"] == "stop"
        assert cut["usage"]["completion_tokens"] == position + 1
    assert tried > 3


def test_the_text_of_a_stop_token_is_left_out_unless_asked_for(server: LiveServer) -> None:
    free = server.post(prompt=REPEATED["words"], return_token_ids=True, logprobs=0)["choices"][0]
    ids, tokens = free["token_ids"], free["logprobs"]["tokens"]
    position = next(i for i in range(4, len(ids)) if ids[i] not in ids[:i] and tokens[i].strip().isalpha())
    for include in (False, True):
        expected = "".join(tokens[: position + include])
        fields = {"prompt": REPEATED["words"], "stop_token_ids": [ids[position]], "include_stop_str_in_output": include}
        whole, chunks = server.post(**fields), server.stream(**fields)
        assert whole["choices"][0]["text"] == "".join(pieces(chunks, "text")) == expected
        assert whole["choices"][0]["finish_reason"] == pieces(chunks, "finish_reason")[0] == "stop"
        assert whole["choices"][0]["stop_reason"] == ids[position]
        assert whole["usage"]["completion_tokens"] == position + 1


def test_a_stop_string_counts_from_min_tokens_on(server: LiveServer) -> None:
    """One that is complete before stays in the text."""
    text = server.post(prompt=REPEATED["spaces"], max_tokens=40)["choices"][0]["text"]
    stop = "\tc"
    assert text.count(stop) > 2
    assert text.index(stop) < 5
    fields = {"prompt": REPEATED["spaces"], "max_tokens": 40, "stop": stop}
    assert server.post(**fields)["choices"][0]["text"] == text[: text.index(stop)]
    cut = server.post(**fields, min_tokens=10, return_token_ids=True)
    assert cut["choices"][0]["text"].count(stop) >= 1
    assert text.startswith(cut["choices"][0]["text"] + stop)
    assert cut["usage"]["completion_tokens"] >= 10


def test_a_bad_word_appears_neither_with_a_space_nor_without(server: LiveServer, smollm2_path: Any) -> None:
    """A word of one token behind a space, and of several without."""
    tokenizer = load_tokenizer(open_checkpoint(smollm2_path))
    text = server.post(prompt=REPEATED["words"])["choices"][0]["text"]
    num_tokens = {word: [len(tokenizer.encode(before + word, False)) for before in (" ", "")] for word in text.split()}
    word = next(word for word, (behind_space, alone) in num_tokens.items() if behind_space == 1 < alone)
    for prompt in (REPEATED["words"], f"{word} {word} {word}\n{word} {word} {word}\n"):
        assert word in server.post(prompt=prompt)["choices"][0]["text"]
        for given in (word, f" {word}"):
            choice = server.post(prompt=prompt, bad_words=[given], max_tokens=16)["choices"][0]
            assert word not in re.findall(r"\w+", choice["text"])
            assert choice["finish_reason"] == "length"


def test_a_message_is_the_same_as_a_string_and_as_a_part(server: LiveServer) -> None:
    answers = [chat(server, **continued("The answer is", as_parts=as_parts)) for as_parts in (False, True)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]


def test_ignored_ends_give_exactly_the_tokens_that_were_asked_for(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]  # its greedy answer is a short one
    free = chat(server, messages=messages, max_tokens=40)
    assert free["choices"][0]["finish_reason"] == "stop"
    for num_tokens in (1, 3, 40):
        answer = chat(server, messages=messages, max_tokens=num_tokens, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == num_tokens
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + num_tokens


def test_an_empty_prompt_begins_a_document(server: LiveServer) -> None:
    begun = server.post(prompt=[IM_START], max_tokens=4)
    for prompt in ("", [""]):
        answer = server.post(prompt=prompt, max_tokens=4)
        assert answer["choices"] == begun["choices"]
        assert answer["usage"]["prompt_tokens"] == 1
    for prompt in ([], [[]]):
        response = httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_raw_events(server: LiveServer) -> None:
    """Each event is one line of JSON and an empty one; the last tells the end."""
    body = {"prompt": ["\n", "“"], "n": 2, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    *events, done, rest = response.content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    parsed = [json.loads(event.removeprefix(b"data: ")) for event in events if event.startswith(b"data: ")]
    assert len(parsed) == len(events)
    assert not any(b"\n" in event for event in events)
    assert [chunk["usage"] is None for chunk in parsed] == [True] * (len(parsed) - 1) + [False]
