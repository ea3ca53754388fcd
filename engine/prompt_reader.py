"""What requests ask about their prompts: log-probabilities of its tokens, an embedding of it.

    prompt   0                       start                   num_tokens
             |<- computed before   ->|<- computed now ->|<- later ->|
                 |<- wanted from `first` on …

A reader takes the last layer's rows chunk by chunk. Its answer leaves at once with the first output token, or with the
end; a request that is preempted before that starts over with a new reader, and after it needs none.
"""

import math
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from scheduler.output import NewRequest, ScheduledRequest, SchedulerOutput

from .logprobs import RawLogprobs
from .messages import TokenLogprobs
from .models.decoder import Decoder
from .transfer import Download, upload

_ROWS_AT_ONCE = 64
"""Rows of logits that exist at the same time."""


class PromptAnswer(msgspec.Struct, frozen=True):
    """See `TokenOutput`."""

    logprobs: list[TokenLogprobs] | None = None
    embedding: list[float] | None = None


class PromptReader:
    """One request's."""

    def __init__(self, request: NewRequest) -> None:
        params = request.sampling_params
        self.num_tokens = request.num_prompt_tokens
        self._next_ids = np.array(request.token_ids[1:], np.int64)
        self._num_logprobs = params.prompt_logprobs
        self._logprobs: list[TokenLogprobs] = []
        self._pools = params.pooling is not None
        self._pooled_from = self.num_tokens - 1 if params.pooling == "last" else 0
        self._sum: Tensor | None = None  # float64 [hidden_size]: what chunks change is rounded away in the end
        self.first = 0 if params.prompt_logprobs is not None else self._pooled_from
        """Position of the first row that is wanted."""

    def read(self, hidden: Tensor, start: int, model: Decoder) -> None:
        """The wanted rows from position `start` on, before the final norm: [rows, hidden_size]"""
        if self._num_logprobs is not None:
            end = min(len(hidden), len(self._next_ids) - start)
            for row in range(0, end, _ROWS_AT_ONCE):
                self._read_logprobs(hidden[row : min(row + _ROWS_AT_ONCE, end)], self._num_logprobs, model)
        if self._pools:
            states = model.final_states(hidden[max(0, self._pooled_from - start) :])
            total = states.sum(0, dtype=torch.float64)
            self._sum = total if self._sum is None else self._sum + total

    def answer(self) -> PromptAnswer | None:
        """When all rows are read. None: the model's output is not a number."""
        embedding = None
        if self._sum is not None:
            embedding = (self._sum / (self.num_tokens - self._pooled_from)).float().tolist()
        if not all(map(math.isfinite, [*(entry.logprob for entry in self._logprobs), *(embedding or ())])):
            return None
        return PromptAnswer(None if self._num_logprobs is None else self._logprobs, embedding)

    def _read_logprobs(self, hidden: Tensor, num_logprobs: int, model: Decoder) -> None:
        num_read = len(self._logprobs)
        next_ids = self._next_ids[num_read : num_read + len(hidden)]
        logits = model.compute_logits(hidden)
        raw = RawLogprobs(logits, np.full(len(hidden), num_logprobs))
        [tokens] = upload([next_ids], logits.device)
        host = Download({"token_ids": tokens, **raw.of(tokens)}).wait()
        self._logprobs += filter(None, raw.entries(host))


@dataclass(frozen=True)
class Reading:
    """What one reader takes from a step."""

    request_id: str
    reader: PromptReader
    start: int
    """Position of the first of its tokens that is wanted, if any is;"""
    rows: range
    """the indices of all of them into the step's tokens."""
    is_last: bool


class PromptReaders:
    """Of all requests that have not read their prompts yet; others cost nothing."""

    def __init__(self) -> None:
        self._readers: dict[str, PromptReader] = {}

    def update(self, output: SchedulerOutput) -> None:
        """Drop and add readers as the scheduler says."""
        for request_id in output.dropped_request_ids:
            self._readers.pop(request_id, None)
        for request in output.new_requests:
            params = request.sampling_params
            asks = params.prompt_logprobs is not None or params.pooling is not None
            if asks and len(request.token_ids) == request.num_prompt_tokens:
                self._readers[request.request_id] = PromptReader(request)

    def readings(self, scheduled: list[ScheduledRequest], query_start_loc: np.ndarray) -> list[Reading]:
        """`query_start_loc`: int32 [scheduled + 1], see `StepInputs`."""
        if not self._readers:
            return []
        readings = []
        for share, row in zip(scheduled, query_start_loc.tolist(), strict=False):
            if reader := self._readers.get(share.request_id):
                begin, end = share.num_computed_tokens, share.num_computed_tokens + share.num_scheduled_tokens
                start = min(max(begin, reader.first), end)
                rows = range(row + start - begin, row + end - begin)
                readings.append(Reading(share.request_id, reader, start, rows, end == reader.num_tokens))
        return readings

    @staticmethod
    def wanted(readings: list[Reading], logit_indices: np.ndarray) -> np.ndarray:
        """Indices of the step's tokens, int64 and ascending: those of `readings`, and `logit_indices`."""
        if not readings:
            return logit_indices
        return np.unique(np.concatenate([logit_indices, *(np.array(reading.rows, np.int64) for reading in readings)]))

    def read(
        self, readings: list[Reading], hidden: Tensor, wanted: np.ndarray, model: Decoder
    ) -> dict[str, PromptAnswer | None]:
        """Answers of the prompts that end with this step, by request id.

        hidden [rows, hidden_size]: of the tokens `wanted`, int64 [rows] and ascending, all rows of `readings` among
        them.
        """
        answers = {}
        for reading in readings:
            begin = int(np.searchsorted(wanted, reading.rows.start))
            reading.reader.read(hidden[begin : begin + len(reading.rows)], reading.start, model)
            if reading.is_last:
                answers[reading.request_id] = self._readers.pop(reading.request_id).answer()
        return answers
