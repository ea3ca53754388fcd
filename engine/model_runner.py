"""`ModelRunner`: one scheduled step on the device.

execute   rows and input arrays -> tensors -> attention prepared once -> all layers -> logits of the rows that sample
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
from .sampler import sample


@dataclass(frozen=True)
class StepLogits:
    """What `execute` leaves for `sample`."""

    inputs: StepInputs
    logits: Tensor  # float32 [rows that sample, vocab]


@dataclass(frozen=True)
class StepResult:
    """By request id; each request that sampled is in `token_ids` or in `failed`."""

    token_ids: dict[str, int]
    failed: dict[str, str]
    logprobs: dict[str, TokenLogprobs]


class ModelRunner:
    """Owns the rows of the batch; the backend holds the KV cache."""

    def __init__(self, model: Decoder, backend: AttentionBackend, batch: InputBatch, device: torch.device) -> None:
        self._model = model
        self._backend = backend
        self._batch = batch
        self._device = device

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> StepLogits:
        """Compute the step's tokens: their KV, and the logits of the rows that sample."""
        self._batch.update(output)
        inputs = self._batch.inputs(output.scheduled)
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
            self._tensor(inputs.logit_indices),
            self._backend,
        )
        return StepLogits(inputs, self._model.compute_logits(hidden))

    @torch.inference_mode()
    def sample(self, step: StepLogits) -> StepResult:
        """Choose the next token of each row that samples, and append it to the row."""
        inputs = step.inputs
        if not inputs.sample_ids:
            return StepResult({}, {}, {})
        sampled = sample(step.logits, self._batch.sampling, inputs.sample_rows, self._model.ops)
        good = ~sampled.failed
        self._batch.append(inputs.sample_rows[good], sampled.token_ids[good])
        token_ids, failed, logprobs = {}, {}, {}
        for index, (request_id, token_id) in enumerate(zip(inputs.sample_ids, sampled.token_ids.tolist(), strict=True)):
            if sampled.failed[index]:
                failed[request_id] = "the model's output is not a number, or no token is allowed"
                continue
            token_ids[request_id] = token_id
            if sampled.logprobs and (entry := sampled.logprobs[index]):
                logprobs[request_id] = entry
        return StepResult(token_ids, failed, logprobs)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)
