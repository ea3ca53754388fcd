"""`InputBatch`: the running requests as rows of arrays, and the inputs of one step computed from them.

    token_ids    [max_num_seqs, max_model_len]   |<- num_tokens ->|  unset
    block_table  [max_num_seqs, max_blocks]      blocks in order, then 0

A row belongs to a request from its admission until the scheduler drops it. Rows change by differences (new
blocks, one sampled token); the inputs of a step are formulas over the arrays, without a loop over tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scheduler.output import NewRequest, ScheduledRequest, SchedulerOutput

from .kernels.ops import Penalties
from .sampling_rows import SamplingRows
from .structured.language import Language


@dataclass(frozen=True)
class StepInputs:
    """One step's tokens, packed: those of the first scheduled request, then those of the second, …

    Legend: T tokens of the step, S scheduled requests, R requests that sample.
    """

    token_ids: np.ndarray
    """int64 [T]; they mean nothing where only the device knows the token:"""
    pending: np.ndarray
    """int64 [P]: at these of the T places"""
    pending_rows: np.ndarray
    """int64 [P]: it is the newest token of these rows."""
    positions: np.ndarray  # int64 [T]
    rope_lengths: np.ndarray
    """int64 [T]: max(prompt tokens of the request, position + 1), the length that RoPE frequencies may depend on;
    so a prompt in chunks equals a whole one."""
    query_start_loc: np.ndarray  # int32 [S + 1]
    seq_lens: np.ndarray  # int32 [S]
    block_table: np.ndarray  # int32 [S, blocks of the longest]
    slot_mapping: np.ndarray  # int64 [T]
    logit_indices: np.ndarray  # int64 [R]: last token of each request that samples
    sample_rows: np.ndarray  # int64 [R]: their rows
    sample_admissions: np.ndarray  # int64 [R]: and to whom these belong, see `NewRequest.admission`
    sample_ids: list[str]  # [R]: their request ids


class InputBatch:
    """At most `max_num_seqs` rows of at most `max_model_len` tokens."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        language_of: Callable[[str], Language | None] = lambda _: None,
        penalties: Penalties | None = None,
    ) -> None:
        """`language_of` tells by a request's id to which language its output has to belong; `penalties` are those of
        the machine's operations, by default the ones of the host."""
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.max_blocks = -(-max_model_len // block_size)
        self._block_size = block_size
        self._language_of = language_of
        # np.zeros takes memory only where it is written
        self._token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self._block_table = np.zeros((max_num_seqs, self.max_blocks), np.int32)
        self._num_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self._admission = np.full(max_num_seqs, -1)
        self._row: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs))[::-1]
        self.sampling = SamplingRows(max_num_seqs, penalties)

    def update(self, output: SchedulerOutput) -> None:
        """Drop, add and extend rows as the scheduler says."""
        for request_id in output.dropped_request_ids:
            row = self._row.pop(request_id)
            self.sampling.clear(row)
            self._admission[row] = -1
            self._free_rows.append(row)
        for request in output.new_requests:
            self._add(request)
        for scheduled in output.scheduled:
            if scheduled.new_block_ids:
                self._extend_block_table(self._row[scheduled.request_id], scheduled.new_block_ids)

    def inputs(self, scheduled: list[ScheduledRequest]) -> StepInputs:
        """The tensors of a step, as numpy arrays. `update` comes first."""
        count = len(scheduled)
        rows = np.fromiter((self._row[each.request_id] for each in scheduled), np.int64, count)
        computed = np.fromiter((each.num_computed_tokens for each in scheduled), np.int64, count)
        lengths = np.fromiter((each.num_scheduled_tokens for each in scheduled), np.int64, count)
        samples = np.fromiter((each.needs_sample for each in scheduled), bool, count)

        ends = lengths.cumsum()
        starts = ends - lengths
        owner = np.repeat(np.arange(count), lengths)  # [T]: index into `scheduled`
        positions = np.arange(len(owner)) + (computed - starts)[owner]
        token_rows = rows[owner]
        blocks, offsets = np.divmod(positions, self._block_size)
        seq_lens = computed + lengths
        num_blocks = -(-int(seq_lens.max()) // self._block_size)
        pending = np.flatnonzero(positions >= self._num_tokens[token_rows])
        return StepInputs(
            token_ids=self._token_ids[token_rows, positions].astype(np.int64),
            pending=pending,
            pending_rows=token_rows[pending],
            positions=positions,
            rope_lengths=np.maximum(self._num_prompt_tokens[token_rows], positions + 1),
            query_start_loc=np.concatenate([[0], ends]).astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            block_table=self._block_table[rows, :num_blocks],
            slot_mapping=self._block_table[token_rows, blocks].astype(np.int64) * self._block_size + offsets,
            logit_indices=ends[samples] - 1,
            sample_rows=rows[samples],
            sample_admissions=self._admission[rows[samples]],
            sample_ids=[each.request_id for each in scheduled if each.needs_sample],
        )

    def is_owned(self, rows: np.ndarray, admissions: np.ndarray) -> np.ndarray:
        """bool [rows]: whether each row still belongs to whom it belonged to then."""
        owned: np.ndarray = self._admission[rows] == admissions
        return owned

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """The host knows one sampled token more of each of `rows`."""
        self._token_ids[rows, self._num_tokens[rows]] = token_ids
        self._num_tokens[rows] += 1
        self.sampling.append(rows, token_ids)

    def _add(self, request: NewRequest) -> None:
        row = self._free_rows.pop()
        self._row[request.request_id] = row
        self._admission[row] = request.admission
        token_ids = np.array(request.token_ids, np.int32)
        self._token_ids[row, : len(token_ids)] = token_ids
        self._num_tokens[row] = len(token_ids)
        self._num_prompt_tokens[row] = request.num_prompt_tokens
        self._block_table[row, : self._num_blocks[row]] = 0
        self._num_blocks[row] = 0
        self.sampling.put(
            row,
            request.sampling_params,
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
            prompt_token_ids=token_ids[: request.num_prompt_tokens],
            output_token_ids=token_ids[request.num_prompt_tokens :],
            language=self._language_of(request.request_id),
        )

    def _extend_block_table(self, row: int, block_ids: list[int]) -> None:
        start = self._num_blocks[row]
        self._block_table[row, start : start + len(block_ids)] = block_ids
        self._num_blocks[row] += len(block_ids)
