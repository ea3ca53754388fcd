"""What sampling on a GPU launches, for tests/engine/ahead_of_time.py."""

from collections.abc import Iterator
from unittest import mock

import numpy as np
import torch

from configs.sampling import SamplingParams
from engine.kernels.gpu import penalties, sampling
from engine.kernels.ops import TokenChoice
from tests.engine.ahead_of_time import Launch

META = torch.device("meta")
PENALISED = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1)


def launches(capability: tuple[int, int]) -> Iterator[Launch]:
    """Vocabularies of Llama 3, Gemma and GPT-2, whose rows are not aligned; each kernel has one configuration."""
    for vocab_size in (128_256, 262_144, 50_257):
        kernels = ("groups", "greedy", "low", "collect", "bound", "sums", "pick")
        expected = {f"{kernel}_kernel": () for kernel in kernels}
        if vocab_size % 4 == 0:
            expected |= dict.fromkeys(("groups_kernel", "collect_kernel", "sums_kernel"), ("LDG.128",))
        yield Launch(f"choose {vocab_size}", lambda size=vocab_size: _choose(size), expected)
        yield Launch(f"penalise {vocab_size}", lambda size=vocab_size: _penalise(size), {"penalties_kernel": ()})


def _choose(vocab_size: int) -> None:
    choice = TokenChoice(
        temperature=np.array([0, 1], np.float32),
        top_k=np.array([0, 20]),
        top_p=np.array([1, 0.9]),
        min_p=np.zeros(2, np.float32),
        u=np.zeros(2),
    )
    with mock.patch.object(sampling, "upload", _upload):
        sampling.choose_tokens(torch.empty(2, vocab_size, device=META), choice)


def _penalise(vocab_size: int) -> None:
    with mock.patch.object(penalties, "upload", _upload):
        state = penalties.CountedPenalties(vocab_size, META)
        state.put(0, PENALISED, np.array([1, 2]), np.array([3]))
        state.apply(torch.empty(2, vocab_size, device=META), np.arange(2))


def _upload(arrays, device):
    return [torch.from_numpy(np.asarray(array)).to(device) for array in arrays]
