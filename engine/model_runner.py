"""`ModelRunner`: scheduled steps on the device.

launch    rows and input arrays -> tensors -> attention prepared once -> all layers -> what is asked about prompts
          -> logits of the rows that sample -> token ids, which stay on the device for the next step
collect   token ids to the host -> rows, matchers, outputs

On a GPU `launch` only queues work, and the next step may be launched before this one is collected.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scheduler.output import SchedulerOutput

from .attention.metadata import AttentionBackend, AttentionMetadata
from .decode_graphs import DecodeGraphs, StepTensors
from .input_batch import InputBatch, StepInputs
from .messages import TokenLogprobs
from .models.decoder import Decoder
from .prompt_reader import PromptAnswer, PromptReaders
from .sampler import PendingSample, sample
from .transfer import upload

_NOT_A_NUMBER = "the model's output is not a number"
_NONE_ALLOWED = "no token is allowed here: the restrictions of the output contradict each other"


@dataclass(frozen=True)
class StepUnderWay:
    """What `launch` leaves for `collect`."""

    inputs: StepInputs
    sample: PendingSample | None
    """None when no row samples."""
    prompts: dict[str, PromptAnswer | None]
    """By request id: of the prompts that end with this step and are asked about; None where the request fails."""


@dataclass(frozen=True)
class StepResult:
    """By request id; each request that sampled, and still has its row, is in `token_ids` or in `failed`."""

    token_ids: dict[str, int]
    failed: dict[str, str]
    logprobs: dict[str, TokenLogprobs]
    prompts: dict[str, PromptAnswer]
    """Of those who have not failed."""
    complete: set[str]
    """Those whose output is in its language, and cannot be longer."""
    refused: frozenset[str] = frozenset()
    """Ids of the requests that failed because of what they ask for."""


class ModelRunner:
    """Owns the rows of the batch; the backend holds the KV cache."""

    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend,
        batch: InputBatch,
        device: torch.device,
        *,
        cuda_graphs: bool = False,
    ) -> None:
        self._model = model
        self._backend = backend
        self._batch = batch
        self._device = device
        self._graphs: DecodeGraphs | None = None
        if cuda_graphs:
            sizes = {name: getattr(batch, name) for name in ("max_num_seqs", "max_blocks", "max_model_len")}
            self._graphs = DecodeGraphs(self._decode, backend, **sizes, device=device)
        self._readers = PromptReaders()
        self._newest = torch.zeros(batch.max_num_seqs, dtype=torch.int64, device=device)
        """The token that each row chose last."""

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> StepUnderWay | None:
        """Compute the step's tokens: their KV, and the next token of the rows that sample. None for an empty step."""
        self._batch.update(output)
        self._readers.update(output)
        if not output.scheduled:
            return None
        inputs = self._batch.inputs(output.scheduled)
        readings = self._readers.readings(output.scheduled, inputs.query_start_loc)
        step = self._tensors(inputs)
        if readings:
            wanted = self._readers.wanted(readings, inputs.logit_indices)
            hidden = self._forward(step, wanted)
            prompts = self._readers.read(readings, hidden, wanted, self._model)
            [index] = upload([np.searchsorted(wanted, inputs.logit_indices)], self._device)
            logits = self._model.compute_logits(hidden[index])
        else:
            prompts, logits = {}, self._logits(step, inputs.logit_indices)
        if not inputs.sample_ids:
            return StepUnderWay(inputs, None, prompts)
        sampled = sample(logits, self._batch.sampling, inputs.sample_rows, self._model.ops)
        [rows] = upload([inputs.sample_rows], self._device)
        self._newest[rows] = sampled.token_ids
        return StepUnderWay(inputs, sampled, prompts)

    @torch.inference_mode()
    def collect(self, step: StepUnderWay) -> StepResult:
        """Wait for the step's tokens and append them to the rows that still belong to who sampled them."""
        inputs = step.inputs
        prompts = {request_id: answer for request_id, answer in step.prompts.items() if answer is not None}
        failed = dict.fromkeys(step.prompts.keys() - prompts.keys(), _NOT_A_NUMBER)
        if step.sample is None:
            return StepResult({}, failed, {}, prompts, set())
        sampled = step.sample.wait()
        owned = self._batch.is_owned(inputs.sample_rows, inputs.sample_admissions)
        good = owned & ~sampled.failed
        self._batch.append(inputs.sample_rows[good], sampled.token_ids[good])
        token_ids, logprobs, complete, refused = {}, {}, set(), set()
        matchers = dict(self._batch.sampling.matchers_of(inputs.sample_rows.tolist()))
        for index, (request_id, token_id) in enumerate(zip(inputs.sample_ids, sampled.token_ids.tolist(), strict=True)):
            if not owned[index]:
                continue
            if sampled.failed[index]:
                failed[request_id] = _NONE_ALLOWED if sampled.starved[index] else _NOT_A_NUMBER
                if sampled.starved[index]:
                    refused.add(request_id)
                prompts.pop(request_id, None)
                continue
            matcher = matchers.get(index)
            if matcher is not None and matcher.is_too_slow:
                failed[request_id] = "the output's language has too many ways to read it"
                refused.add(request_id)
                continue
            if matcher is not None and matcher.is_complete:
                complete.add(request_id)
            token_ids[request_id] = token_id
            if sampled.logprobs and (entry := sampled.logprobs[index]):
                logprobs[request_id] = entry
        return StepResult(token_ids, failed, logprobs, prompts, complete, frozenset(refused))

    def _tensors(self, inputs: StepInputs) -> StepTensors:
        arrays = (
            *(inputs.token_ids, inputs.positions, inputs.rope_lengths, inputs.pending, inputs.pending_rows),
            *(inputs.query_start_loc, inputs.seq_lens, inputs.block_table, inputs.slot_mapping),
        )
        uploaded = upload(arrays, self._device)
        token_ids, positions, rope_lengths, pending, pending_rows = uploaded[:5]
        query_start_loc, seq_lens, block_table, slot_mapping = uploaded[5:]
        if len(inputs.pending):
            token_ids[pending] = self._newest[pending_rows]
        metadata = AttentionMetadata(
            *(query_start_loc, seq_lens, block_table, slot_mapping), inputs.query_start_loc, inputs.seq_lens
        )
        return StepTensors(token_ids, positions, rope_lengths, metadata)

    def _logits(self, step: StepTensors, logit_indices: np.ndarray) -> Tensor:
        """float32 [rows that sample, vocab]"""
        logits = self._graphs.run(step) if self._graphs is not None and len(logit_indices) else None
        if logits is None:
            return self._model.compute_logits(self._forward(step, logit_indices))
        if len(logit_indices) < len(logits):
            [index] = upload([logit_indices], self._device)
            return logits[index]
        return logits

    def _decode(self, step: StepTensors) -> Tensor:
        """Logits of every row of a step for which the backend is prepared; nothing in it depends on the host."""
        every = torch.arange(len(step.token_ids), device=self._device)
        hidden = self._model.forward(step.token_ids, step.positions, step.rope_lengths, every, self._backend)
        return self._model.compute_logits(hidden)

    def _forward(self, step: StepTensors, wanted: np.ndarray) -> Tensor:
        """wanted int64 [rows] -> hidden states of these tokens [rows, hidden_size]"""
        self._backend.prepare(step.metadata)
        [rows] = upload([wanted], self._device)
        return self._model.forward(step.token_ids, step.positions, step.rope_lengths, rows, self._backend)
