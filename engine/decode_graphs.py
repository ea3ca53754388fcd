"""Decode steps replayed from CUDA graphs: one launch in place of hundreds that take longer than their work.

    step of 5 rows        | 5 rows | 3 rows of padding |       graph of 8 rows
    persistent inputs     | slices that the graph of 8 rows reads | …, as long as the largest graph

A graph reads and writes fixed addresses. Hence a step is copied into the persistent inputs, and its result lies in one
buffer that all graphs share, until the next replay.
"""

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .attention.metadata import AttentionBackend, AttentionMetadata

logger = logging.getLogger("octavo.engine")

MOST_ROWS = 256
"""A larger step keeps a GPU busy for longer than its launches take."""


@dataclass(frozen=True)
class StepTensors:
    """What the network reads in one step, on the device: T tokens, packed request after request."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    rope_lengths: Tensor  # int64 [T], see `StepInputs`
    metadata: AttentionMetadata


Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes work on the device, which it may run several times, and returns what replays it."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Rows of the graphs, ascending: 1, 2, 4, 8, then every 16, up to the largest batch or `MOST_ROWS`."""
    return sorted({min(size, max_num_seqs) for size in (1, 2, 4, 8, *range(16, MOST_ROWS + 1, 16))})


class DecodeGraphs:
    """Graphs of decode steps, each captured when a step first needs it, over padding: capturing stores no KV.

    Before the first of them the largest is captured. All share one pool of memory, in which a capture takes what the
    ones before it gave back, so the pool is as large as the largest needs; growing ones would add to it each time.

    What `backend.prepare` made for a graph is kept for as long as the graph, so `prepare` may replace its workspaces,
    but must not resize them. Replays need no `prepare`, whatever was prepared for eager steps in between.
    """

    def __init__(
        self,
        compute: Callable[[StepTensors], Tensor],
        backend: AttentionBackend,
        *,
        max_num_seqs: int,
        max_blocks: int,
        max_model_len: int,
        device: torch.device,
        record: Record | None = None,
    ) -> None:
        """`compute` gives a row for each token of a step for which `backend` is prepared, and does not wait for the
        device. `max_blocks`: columns of the widest block table. `record` stands in for `GraphPool(device).record`."""
        self._compute = compute
        self._backend = backend
        self._sizes = graph_sizes(max_num_seqs) if backend.captures_decode else []
        self._inputs = GraphInputs(max(self._sizes, default=0), max_blocks, max_model_len, device)
        self._record = record or GraphPool(device).record
        self._graphs: dict[int, _Graph | None] = {}
        self._result: Tensor | None = None

    @torch.inference_mode()
    def run(self, step: StepTensors) -> Tensor | None:
        """What `compute` gives for a decode step of one token per sequence: [T, …]. None where no graph serves: too
        many rows, several tokens of a sequence, a backend that cannot be captured, or a capture that failed.

        The next replay overwrites it. So it is used up, or overwritten, by work that is queued before the next step.
        """
        rows = len(step.token_ids)
        place = bisect_left(self._sizes, rows)
        if place == len(self._sizes) or rows != len(step.metadata.seq_lens):
            return None
        graph = self._graph(self._sizes[place])
        if graph is None:
            return None
        self._inputs.fill(step)
        graph.replay()
        assert self._result is not None
        return self._result[:rows]

    def _graph(self, size: int) -> "_Graph | None":
        for wanted in (size,) if self._graphs else (self._sizes[-1], size):
            if wanted not in self._graphs:
                self._graphs[wanted] = self._capture(wanted)
        return self._graphs[size]

    def _capture(self, size: int) -> "_Graph | None":
        """None where it fails: steps of this size are then computed one kernel after the other."""
        start = time.perf_counter()
        self._inputs.clear()
        step = self._inputs.rows(size)

        def work() -> None:
            result = self._compute(step)
            if self._result is None:
                self._result = result.new_empty((self._sizes[-1], *result.shape[1:]))
            self._result[:size].copy_(result)

        try:
            self._backend.prepare(step.metadata)
            replay = self._record(work)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            logger.warning("decode steps of %d rows run without a CUDA graph: %s", size, reason)
            return None
        logger.debug("captured decode steps of %d rows in %.2f s", size, time.perf_counter() - start)
        return _Graph(replay, dict(vars(self._backend)))


@dataclass(frozen=True)
class _Graph:
    replay: Callable[[], None]
    prepared: dict[str, object]
    """The backend's attributes, kept alive: the captured kernels hold addresses in its workspaces."""


class GraphInputs:
    """The tensors that all graphs read. Outside of the last step's rows and columns they are padding: token 0 at
    position 0 of a sequence of length 0, whose key and value are stored nowhere."""

    def __init__(self, num_rows: int, max_blocks: int, max_model_len: int, device: torch.device) -> None:
        self.token_ids, self.positions, self.rope_lengths = (
            torch.zeros(num_rows, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.slot_mapping = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device)
        self.host_query_start_loc = np.arange(num_rows + 1, dtype=np.int32)
        self.query_start_loc = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self.host_seq_lens = np.full(num_rows, max_model_len, np.int32)
        self.used = (0, 0)
        """Rows and columns of the block table that are not padding."""

    def rows(self, size: int) -> StepTensors:
        """The first `size` rows, which change with every step; on the host are the largest values."""
        metadata = AttentionMetadata(
            query_start_loc=self.query_start_loc[: size + 1],
            seq_lens=self.seq_lens[:size],
            block_table=self.block_table[:size],
            slot_mapping=self.slot_mapping[:size],
            host_query_start_loc=self.host_query_start_loc[: size + 1],
            host_seq_lens=self.host_seq_lens[:size],
        )
        return StepTensors(self.token_ids[:size], self.positions[:size], self.rope_lengths[:size], metadata)

    def fill(self, step: StepTensors) -> None:
        """Copy a decode step into the first rows: three launches, and six more when rows have left the batch."""
        metadata = step.metadata
        rows, columns = metadata.block_table.shape
        self._clear_outside(rows, columns)
        torch._foreach_copy_(
            [each[:rows] for each in (self.token_ids, self.positions, self.rope_lengths, self.slot_mapping)],
            [step.token_ids, step.positions, step.rope_lengths, metadata.slot_mapping],
        )
        self.seq_lens[:rows].copy_(metadata.seq_lens)
        self.block_table[:rows, :columns].copy_(metadata.block_table)

    def clear(self) -> None:
        self._clear_outside(0, 0)

    def _clear_outside(self, rows: int, columns: int) -> None:
        """Padding in place of what earlier steps left behind: its slots belong to others by now."""
        used_rows, used_columns = self.used
        if rows < used_rows:
            stale = slice(rows, used_rows)
            torch._foreach_zero_([each[stale] for each in (self.token_ids, self.positions, self.rope_lengths)])
            self.slot_mapping[stale] = -1
            self.seq_lens[stale] = 0
            self.block_table[stale, :used_columns] = 0
        if columns < used_columns:
            self.block_table[:rows, columns:used_columns] = 0
        self.used = (rows, columns)


class GraphPool:
    """Records work in CUDA graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work` twice, so that its kernels are compiled and loaded and its libraries have their workspaces, which
        is forbidden while a graph is captured; then capture it. Other threads may use the device meanwhile."""
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream), _no_collection():
                work()
                work()
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    work()
        except BaseException:
            self._stream = None  # a capture that broke off leaves its stream and its pool unusable
            raise
        current.wait_stream(self._stream)
        return graph.replay


@contextmanager
def _no_collection() -> Iterator[None]:
    """The garbage collector could free a tensor, or another graph, amid a capture, and that ends it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
