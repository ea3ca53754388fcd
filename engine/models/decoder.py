"""The network: a decoder with grouped-query attention and rotary positions.

One file for every family; families differ by ModelConfig. Holds no requests and no cache: the attention backend that
is passed to `forward` owns the cache and knows which tokens belong together.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.metadata import AttentionBackend
from engine.kernels.ops import LayerWeights, Ops

from .config import ModelConfig
from .rope import RotaryTables


@dataclass(frozen=True)
class DecoderWeights:
    embed: Any  # [vocab_size, hidden_size], or the head where `Ops.embeds_from_head` and both are tied
    layers: list[LayerWeights]
    final_norm: Tensor  # [hidden_size]
    head: Any  # Linear: hidden_size -> vocab_size
    num_parameters: int
    """Elements, a tied head counted once."""
    final_norm_bias: Tensor | None = None
    positions: Tensor | None = None  # [learned_positions, hidden_size]

    @property
    def bytes_per_step(self) -> int:
        """What every step reads, as it is stored: of an embedding of its own only rows are read."""
        return sum(_num_bytes(part) for part in (*self.layers, self.final_norm, self.head))


class Decoder:
    def __init__(self, config: ModelConfig, ops: Ops, weights: DecoderWeights) -> None:
        assert len(weights.layers) == config.num_layers
        self.config = config
        self.ops = ops
        self.weights = weights
        self.layers = [ops.bind(layer) for layer in weights.layers]
        self.rotary = RotaryTables(config, weights.final_norm.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.final_norm.dtype

    def forward(
        self, token_ids: Tensor, positions: Tensor, rope_lengths: Tensor, wanted: Tensor, backend: AttentionBackend
    ) -> Tensor:
        """All int64 [num_tokens] but `wanted` -> hidden states before the final norm.

        `rope_lengths` counts tokens: max(prompt of the token's request, position + 1). `wanted`, int64 [rows] and
        ascending, says of which tokens: the result is [rows, hidden_size]. `backend` has been prepared for the step.
        """
        hidden = self.ops.embed(token_ids, self.weights.embed)
        if self.config.embedding_scale != 1:
            hidden = hidden * self.config.embedding_scale
        if self.weights.positions is not None:
            hidden = hidden + F.embedding(positions + self.config.position_offset, self.weights.positions)
        return self.ops.run_layers(hidden, self.layers, self.rotary(positions, rope_lengths), wanted, backend)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Rows of `forward` [rows, hidden_size] -> float32 [rows, vocab_size]"""
        weights, cap = self.weights, self.config.logit_softcap
        logits = self.ops.logits(hidden, weights.final_norm, weights.head, weights.final_norm_bias)
        if self.config.logit_scale != 1:
            logits *= self.config.logit_scale
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def final_states(self, hidden: Tensor) -> Tensor:
        """Rows of `forward` [rows, hidden_size] -> behind the final norm, float32 [rows, hidden_size]"""
        norm, bias, eps = self.weights.final_norm.float(), self.weights.final_norm_bias, self.config.rms_norm_eps
        if not self.config.form.layer_norm:
            return F.rms_norm(hidden.float(), list(norm.shape), norm, eps)
        return F.layer_norm(hidden.float(), list(norm.shape), norm, None if bias is None else bias.float(), eps)


def _num_bytes(weights: Any) -> int:
    """Of a tensor, or of all in a named tuple or dataclass."""
    if isinstance(weights, Tensor):
        return weights.nbytes
    if dataclasses.is_dataclass(weights):
        return sum(map(_num_bytes, vars(weights).values()))
    return sum(map(_num_bytes, weights)) if isinstance(weights, tuple) else 0
