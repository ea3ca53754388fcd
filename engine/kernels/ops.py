"""What the network asks of a machine: a decoder layer is two operations around attention, and a head.

Activations are packed over requests: the first dimension counts the tokens of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from torch import Tensor

from .quantised import QuantisedWeight

if TYPE_CHECKING:
    from engine.attention.metadata import AttentionBackend


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. A `Linear` is whatever `Ops.pack` returned."""

    input_norm: Tensor  # [hidden_size]
    qkv: Any  # Linear: rows of q, then k, then v
    q_norm: Tensor | None  # [head_dim]; None without QK-norm
    k_norm: Tensor | None  # [head_dim]
    output: Any  # Linear: heads -> hidden_size
    post_attention_norm: Tensor  # [hidden_size]
    gate_up: Any  # Linear: rows of gate, then up
    down: Any  # Linear: intermediate_size -> hidden_size


@dataclass(frozen=True)
class TokenChoice:
    """How each row of logits becomes a token: arrays [rows]. The meaning is in engine/sampler.py."""

    temperature: np.ndarray  # float32; 0 is greedy
    top_k: np.ndarray  # int64; 0 keeps all
    top_p: np.ndarray  # float64; 1 keeps all
    min_p: np.ndarray  # float32; 0 keeps all
    u: np.ndarray  # float64 in [0, 1)

    def rows(self, index: np.ndarray) -> TokenChoice:
        return TokenChoice(
            self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index], self.u[index]
        )


class Ops(Protocol):
    """Layer operations of one network on one kind of machine."""

    def pack(self, name: str, weight: Tensor, bias: Tensor | None) -> Any:
        """A Linear in the machine's layout: `weight` [rows, columns], `bias` [rows]. Called from several threads."""
        ...

    packs_quantised: ClassVar[bool]
    """Whether there is `pack_quantised`; otherwise quantised weights have to be dequantised and packed."""

    def pack_quantised(self, name: str, weight: QuantisedWeight, bias: Tensor | None) -> Any:
        """As `pack`, for weights of 8 or 4 bits."""
        ...

    def bind(self, layer: LayerWeights) -> Any:
        """The layer in the form that the two operations below take; called once, when all is loaded."""
        ...

    embeds_from_head: ClassVar[bool]
    """Whether a tied head can be the `table` of `embed`, so that its weights are kept once."""

    def embed(self, token_ids: Tensor, table: Any) -> Tensor:
        """Rows of `table` [vocab_size, hidden_size] -> hidden [num_tokens, hidden_size]; later calls may reuse it."""
        ...

    def attention_input(self, hidden: Tensor, layer: Any, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """RMSNorm, QKV projection, QK-norm where there is one, rotary embedding.

        hidden [num_tokens, hidden_size], cos_sin float32 [num_tokens, head_dim] (cosines, then sines, of half a head)
        -> q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim]
        """
        ...

    def attention_output(self, hidden: Tensor, attention: Tensor, layer: Any) -> Tensor:
        """Output projection + residual, then RMSNorm, SiLU(gate) * up, down projection + residual.

        hidden [num_tokens, hidden_size], attention [num_tokens, num_heads, head_dim] -> [num_tokens, hidden_size]
        """
        ...

    def run_layers(
        self, hidden: Tensor, layers: list[Any], cos_sin: Tensor, wanted: Tensor, backend: AttentionBackend
    ) -> Tensor:
        """All layers, as `each_layer`: hidden [num_tokens, hidden_size] -> [rows, hidden_size]"""
        ...

    def logits(self, hidden: Tensor, norm_weight: Tensor, head: Any) -> Tensor:
        """RMSNorm and head: [rows, hidden_size] -> float32 [rows, vocab_size]"""
        ...

    def choose_tokens(self, logits: Tensor, choice: TokenChoice) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int64 [rows], and the highest logit of each row, float32 [rows]: NaN where the row holds one.

        logits float32 [rows, vocab_size], overwritten. Ids mean nothing where the highest logit is not finite.
        """
        ...


def each_layer(
    ops: Ops, hidden: Tensor, layers: list[Any], cos_sin: Tensor, wanted: Tensor, backend: AttentionBackend
) -> Tensor:
    """The layers one by one. Behind its attention, the last computes no more than the rows `wanted`: int64 [rows]."""
    for index, layer in enumerate(layers):
        q, k, v = ops.attention_input(hidden, layer, cos_sin)
        attention = backend.run(index, q, k, v)
        if index == len(layers) - 1:
            hidden, attention = hidden[wanted], attention[wanted]
        hidden = ops.attention_output(hidden, attention, layer)
    return hidden
