"""Texts are refused by their length only where no encoding of them could fit."""

import asyncio
import contextlib
import gc

import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level_vocabulary, sentencepiece_model, sentencepiece_vocabulary
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from configs.errors import Unavailable
from engine.bundled import locate_model
from engine.checkpoints import open_checkpoint
from engine.text.encode_process import encode_in_process
from engine.text.gguf_vocab import build_tokenizer
from engine.text.token_bound import TokenBound
from engine.text.tokenizer import load_tokenizer


def byte_level(normalizer=None, pre_tokenizer=None, added=()):
    backend = build_tokenizer(byte_level_vocabulary())
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, backend.pre_tokenizer])
    backend.add_tokens(list(added))
    return backend


def word_level():
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def fused():
    return Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True))


def sentencepiece(normalizer=None):
    backend = build_tokenizer(sentencepiece_vocabulary(sentencepiece_model()))
    if normalizer is not None:
        backend.normalizer = normalizers.Sequence([normalizer, backend.normalizer])
    return backend


BOUNDED = {
    "byte-level": byte_level(),
    "NFC": byte_level(normalizers.NFC()),
    "long token": byte_level(added=[AddedToken(" " * 40, normalized=False)]),
    "split": byte_level(pre_tokenizer=pre_tokenizers.Split(Regex(r"\s+"), behavior="isolated")),
    "sentencepiece": sentencepiece(),
    "smollm2": load_tokenizer(open_checkpoint(locate_model("smollm2")))._backend,
}
OTHERS = {
    "stripped": byte_level(normalizers.Strip()),
    "accents": byte_level(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "replaced": byte_level(normalizers.Replace(Regex(" +"), " ")),
    "spaces removed": byte_level(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
    "split removes": byte_level(pre_tokenizer=pre_tokenizers.Split(" ", behavior="removed")),
    "takes spaces": byte_level(added=[AddedToken("<x>", rstrip=True, lstrip=True, normalized=False)]),
    "takes spaces, normalized": byte_level(normalizers.Lowercase(), added=[AddedToken("<x>", rstrip=True)]),
    "words": word_level(),
    "unknown": fused(),
    "collapses": sentencepiece(normalizers.Replace("  ", " ")),
}
ALL = {**BOUNDED, **OTHERS}
BOUNDS = {name: TokenBound(backend) for name, backend in ALL.items()}

PARTS = st.sampled_from(
    [" ", "\x04", "\x1d", "a", "e\u0301", "\u0300", "ཱི", "<x>", "<X>", "quick brown", "\n", "日", "\u1100\u1161\u11a8"]
)


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None)
@given(parts=st.lists(st.tuples(PARTS | st.text(max_size=3), st.integers(1, 300)), max_size=4))
@example(parts=[("<X>", 1), (" ", 300), ("<x>", 1), (" ", 300)])
@example(parts=[("\u03b1\u0313\u0300\u0345", 300)])
@example(parts=[("\x04", 300)])
@example(parts=[(" ", 300)])
def test_no_text_has_fewer_tokens_than_the_bound(name, parts):
    text = "".join(part * times for part, times in parts)
    assert BOUNDS[name].least_tokens(text) <= len(ALL[name].encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", BOUNDED)
def test_the_bound_is_of_use(name):
    assert BOUNDS[name].least_tokens("Hello there. " * 10_000) > 1000


async def test_a_process_gives_the_same_ids_and_ends_when_nobody_waits():
    text = "Wörter \ud800 12345\n" * 2000
    tokenizer = load_tokenizer(open_checkpoint(locate_model("smollm2")))
    for special in (True, False):
        ids = await encode_in_process("smollm2", text, add_special_tokens=special)
        assert ids == tokenizer.encode(text, special)
    before = set(psutil.Process().children())
    work = asyncio.create_task(encode_in_process("smollm2", text * 1000, add_special_tokens=True))
    while not (children := set(psutil.Process().children()) - before):
        await asyncio.sleep(0.01)
    await asyncio.sleep(1)
    work.cancel()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, 5)
    assert not alive


def test_a_loop_that_ends_with_its_work_leaves_nothing_of_a_process_behind():
    async def given_up():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await encode_in_process("smollm2", "words " * 1_000_000, add_special_tokens=True)

    def transports() -> list[object]:
        gc.collect()
        return [one for one in gc.get_objects() if issubclass(type(one), asyncio.SubprocessTransport)]

    before, others = set(psutil.Process().children()), transports()
    asyncio.run(given_up())
    assert set(psutil.Process().children()) <= before
    assert not [one for one in transports() if not any(one is other for other in others)]


async def test_without_a_process_the_request_may_come_again(monkeypatch):
    async def refused(*_, **__):
        raise OSError("no memory for a process")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refused)
    with pytest.raises(Unavailable, match="out of memory"):
        await encode_in_process("smollm2", "text", add_special_tokens=True)
