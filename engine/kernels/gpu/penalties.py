"""Step 3 of engine/sampler.py on NVIDIA GPUs: tokens are counted where they are chosen.

    counts   int32 [slots, vocab]   occurrences in the output, + 2**30 if the prompt holds the token

A slot belongs to a row with penalties; there are none before the first such request, and twice as many whenever all are
taken. 256 rows and a vocabulary of 128,256 take 131 MB.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from configs.sampling import SamplingParams
from engine.kernels.penalties import PenaltyFactors
from engine.transfer import upload

IN_PROMPT = tl.constexpr(1 << 30)
BLOCK = 1024
"""Vocabulary ids of a program."""
_FIRST_SLOTS = 4


class CountedPenalties:
    """See `Penalties`."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._factors = np.zeros((0, 3), np.float32)
        self._slot: dict[int, int] = {}  # by row
        self._free: list[int] = []

    @property
    def num_bytes(self) -> int:
        """Memory of the device that is taken now."""
        return self._counts.nbytes

    def put(self, row: int, params: SamplingParams, prompt_ids: np.ndarray, output_ids: np.ndarray) -> None:
        factors = PenaltyFactors.of(params)
        if not factors.change_something:
            return
        if not self._free:
            self._grow()
        slot = self._slot[row] = self._free.pop()
        self._factors[slot] = factors
        output, counts = np.unique(output_ids, return_counts=True)
        ids = np.union1d(prompt_ids, output).astype(np.int64)
        words = np.where(np.isin(ids, prompt_ids), IN_PROMPT.value, 0).astype(np.int32)
        words[np.searchsorted(ids, output)] += counts.astype(np.int32)
        ids_, words_ = upload((ids, words), self._counts.device)
        self._counts[slot].zero_().index_copy_(0, ids_, words_)

    def clear(self, row: int) -> None:
        slot = self._slot.pop(row, None)
        if slot is not None:
            self._free.append(slot)

    def append(self, rows: np.ndarray, token_ids: Tensor) -> None:
        index, slots = self._places(rows)
        if len(index):
            index_, slots_ = upload((index, slots), token_ids.device)
            self._counts[slots_, token_ids[index_]] += 1  # a slot comes once

    def apply(self, logits: Tensor, rows: np.ndarray) -> None:
        index, slots = self._places(rows)
        if len(index):
            vocab = self._counts.shape[1]
            assert logits.is_contiguous(), logits.stride()
            assert (logits.dtype, logits.shape) == (torch.float32, (len(rows), vocab)), (logits.dtype, logits.shape)
            arrays = upload((index, slots, self._factors[slots]), logits.device)
            penalties_kernel[(len(index), triton.cdiv(vocab, BLOCK))](
                logits, self._counts, *arrays, vocab, BLOCK=BLOCK, num_warps=4
            )

    def _places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Indices into `rows` of those with penalties, and their slots: int64."""
        if not self._slot:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        slots = np.array([self._slot.get(row, -1) for row in rows.tolist()], np.int64)
        index = np.flatnonzero(slots >= 0)
        return index, slots[index]

    def _grow(self) -> None:
        size = len(self._counts)
        more = size or _FIRST_SLOTS
        self._counts = torch.cat([self._counts, self._counts.new_zeros(more, self._counts.shape[1])])
        self._factors = np.concatenate([self._factors, np.zeros((more, 3), np.float32)])
        self._free += range(size, size + more)


@triton.jit
def penalties_kernel(logits, counts, index, slots, factors, vocab, BLOCK: tl.constexpr):
    """A block of the vocabulary of one row with penalties; ids that the row does not hold cost the reading of a count.

    index and slots [rows with penalties]; factors [rows with penalties, 3]: repetition, frequency, presence.
    """
    entry = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(counts + tl.load(slots + entry) * vocab + ids, mask=ids < vocab, other=0)
    is_held = words != 0
    count = (words & (IN_PROMPT - 1)).to(tl.float32)
    repetition, frequency = tl.load(factors + 3 * entry), tl.load(factors + 3 * entry + 1)
    presence = tl.load(factors + 3 * entry + 2)
    places = logits + tl.load(index + entry) * vocab + ids
    x = tl.load(places, mask=is_held, other=0.0)
    x = tl.where(x > 0, tl.div_rn(x, tl.broadcast_to(repetition, x.shape)), x * repetition)
    tl.store(places, x - frequency * count - tl.where(count > 0, presence, 0.0), mask=is_held)
