"""`ModelRunner`: one scheduled step on the device.

execute   rows and input arrays -> tensors -> attention prepared once -> all layers -> what is asked about prompts
          -> logits of the rows that sample
sample    logits -> token ids, which go back into the rows
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scheduler.output import SchedulerOutput

from .attention.metadata import AttentionBackend, AttentionMetadata
from .input_batch import InputBatch, StepInputs
from .messages import TokenLogprobs
from .models.decoder import Decoder
from .prompt_reader import PromptAnswer, PromptReaders
from .sampler import sample


@dataclass(frozen=True)
class StepLogits:
    """What `execute` leaves for `sample`."""

    inputs: StepInputs
    logits: Tensor  # float32 [rows that sample, vocab]
    prompts: dict[str, PromptAnswer | None]
    """By request id: of the prompts that end with this step and are asked about; None where the request fails."""


@dataclass(frozen=True)
class StepResult:
    """By request id; each request that sampled is in `token_ids` or in `failed`."""

    token_ids: dict[str, int]
    failed: dict[str, str]
    logprobs: dict[str, TokenLogprobs]
    prompts: dict[str, PromptAnswer]
    """Of those who have not failed."""
    complete: set[str]
    """Those whose output is in its language, and cannot be longer."""


class ModelRunner:
    """Owns the rows of the batch; the backend holds the KV cache."""

    def __init__(self, model: Decoder, backend: AttentionBackend, batch: InputBatch, device: torch.device) -> None:
        self._model = model
        self._backend = backend
        self._batch = batch
        self._device = device
        self._readers = PromptReaders()

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> StepLogits:
        """Compute the step's tokens: their KV, and the logits of the rows that sample."""
        self._batch.update(output)
        self._readers.update(output)
        inputs = self._batch.inputs(output.scheduled)
        readings = self._readers.readings(output.scheduled, inputs.query_start_loc)
        wanted = self._readers.wanted(readings, inputs.logit_indices)
        self._backend.prepare(
            AttentionMetadata(
                query_start_loc=self._tensor(inputs.query_start_loc),
                seq_lens=self._tensor(inputs.seq_lens),
                block_table=self._tensor(inputs.block_table),
                slot_mapping=self._tensor(inputs.slot_mapping),
            )
        )
        hidden = self._model.forward(
            self._tensor(inputs.token_ids),
            self._tensor(inputs.positions),
            self._tensor(inputs.rope_lengths),
            self._tensor(wanted),
            self._backend,
        )
        answers = {}
        if readings:
            answers = self._readers.read(readings, hidden, wanted, self._model)
            hidden = hidden[self._tensor(np.searchsorted(wanted, inputs.logit_indices))]
        return StepLogits(inputs, self._model.compute_logits(hidden), answers)

    @torch.inference_mode()
    def sample(self, step: StepLogits) -> StepResult:
        """Choose the next token of each row that samples, and append it to the row."""
        inputs = step.inputs
        prompts = {request_id: answer for request_id, answer in step.prompts.items() if answer is not None}
        failed = dict.fromkeys(step.prompts.keys() - prompts.keys(), "the model's output is not a number")
        if not inputs.sample_ids:
            return StepResult({}, failed, {}, prompts, set())
        sampled = sample(step.logits, self._batch.sampling, inputs.sample_rows, self._model.ops)
        good = ~sampled.failed
        self._batch.append(inputs.sample_rows[good], sampled.token_ids[good])
        token_ids, logprobs, complete = {}, {}, set()
        matchers = dict(self._batch.sampling.matchers_of(inputs.sample_rows.tolist()))
        for index, (request_id, token_id) in enumerate(zip(inputs.sample_ids, sampled.token_ids.tolist(), strict=True)):
            if sampled.failed[index]:
                failed[request_id] = "the model's output is not a number, or no token is allowed"
                prompts.pop(request_id, None)
                continue
            matcher = matchers.get(index)
            if matcher is not None and matcher.is_too_slow:
                failed[request_id] = "the output's language has too many ways to read it"
                continue
            if matcher is not None and matcher.is_complete:
                complete.add(request_id)
            token_ids[request_id] = token_id
            if sampled.logprobs and (entry := sampled.logprobs[index]):
                logprobs[request_id] = entry
        return StepResult(token_ids, failed, logprobs, prompts, complete)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)
