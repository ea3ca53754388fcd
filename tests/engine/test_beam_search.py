"""Beam search: against all sequences of a small random language, and against transformers."""

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from configs.sampling import SamplingParams
from configs.settings import EngineConfig
from engine.async_engine import AsyncEngine
from engine.beam_search import beam_search
from engine.messages import TokenLogprobs
from tests.engine.tiny_models import EOS_TOKEN_ID, write_tiny

EOS = 0


class Language:
    """Random next-token distributions over `vocab` ids, one for each prefix."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab = vocab
        self.seed = seed

    def logprobs(self, prefix: Sequence[int]) -> list[float]:
        drawn = random.Random(f"{self.seed} {list(prefix)}")
        weights = [drawn.random() ** 3 for _ in range(self.vocab)]
        return [math.log(weight / sum(weights)) for weight in weights]

    def next_tokens(self, count: int):
        async def answer(prefixes):
            entries = []
            for prefix in prefixes:
                logprobs = self.logprobs(prefix)
                ranked = sorted(range(self.vocab), key=lambda token_id: -logprobs[token_id])[:count]
                entries.append(TokenLogprobs(ranked[0], 0.0, [(token_id, logprobs[token_id]) for token_id in ranked]))
            return entries

        return answer

    def all_sequences(self, max_tokens: int, length_penalty: float) -> list[tuple[float, list[int]]]:
        """Every sequence that ends or has `max_tokens` tokens, with its score, best first."""
        found = []
        for length in range(1, max_tokens + 1):
            for ids in itertools.product(range(self.vocab), repeat=length):
                if EOS in ids[:-1] or (length < max_tokens and ids[-1] != EOS):
                    continue
                total = sum(self.logprobs(ids[:index])[ids[index]] for index in range(length))
                found.append((total / length**length_penalty, list(ids)))
        return sorted(found, reverse=True)


@pytest.mark.parametrize("length_penalty", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(5))
async def test_a_beam_as_wide_as_the_language_finds_the_best(seed: int, length_penalty: float) -> None:
    language = Language(vocab=4, seed=seed)
    width = 4**3
    beams = await beam_search(
        language.next_tokens(2 * width), width=width, max_tokens=4, length_penalty=length_penalty, eos_token_ids={EOS}
    )
    expected = language.all_sequences(4, length_penalty)[:width]
    assert [beam.token_ids for beam in beams[:10]] == [ids for _, ids in expected[:10]]
    assert [beam.score(length_penalty) for beam in beams[:10]] == pytest.approx([score for score, _ in expected[:10]])


async def test_one_beam_is_the_greedy_sequence() -> None:
    language = Language(vocab=9, seed=1)
    [beam] = await beam_search(language.next_tokens(2), width=1, max_tokens=6, length_penalty=1.0, eos_token_ids=())
    greedy: list[int] = []
    for _ in range(6):
        logprobs = language.logprobs(greedy)
        greedy.append(max(range(9), key=lambda token_id: logprobs[token_id]))
    assert beam.token_ids == greedy


async def test_beams_equal_those_of_transformers(tmp_path: Path) -> None:
    model = write_tiny(tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype="float32", kv_cache_tokens=4096, num_threads=1)
    engine = await AsyncEngine.start(config)
    try:
        prompt = engine.tokenizer.encode("Once upon")
        found = {}
        for penalty in (0.0, 1.0, 2.0):
            params = SamplingParams(n=3, max_tokens=12)
            found[penalty] = await engine.beam_search(prompt, params, length_penalty=penalty, request_id="b")
    finally:
        await engine.shutdown()
    search = {"num_beams": 3, "num_return_sequences": 3, "early_stopping": "never", "max_new_tokens": 12}
    ends = {"pad_token_id": 0, "eos_token_id": EOS_TOKEN_ID}
    for penalty, beams in found.items():
        expected = model.generate(torch.tensor([prompt]), do_sample=False, length_penalty=penalty, **search, **ends)
        for beam, ids in zip(beams, expected[:, len(prompt) :].tolist(), strict=True):
            assert beam.token_ids == ids[: len(beam.token_ids)]
            assert set(ids[len(beam.token_ids) :]) <= {0}
            assert beam.finish_reason == ("stop" if beam.token_ids[-1] == EOS_TOKEN_ID else "length")
            assert beam.text == engine.tokenizer.decode(beam.token_ids)
