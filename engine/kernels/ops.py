"""What the network asks of a machine: a decoder layer is two operations around attention, and a head.

Activations are packed over requests: the first dimension counts the tokens of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from torch import Tensor

from configs.sampling import SamplingParams

from .quantised import Float8Weight, QuantisedWeight

if TYPE_CHECKING:
    import torch

    from engine.attention.metadata import AttentionBackend


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. A `Linear` is whatever `Ops.pack` returned."""

    qkv: Any  # Linear: rows of q, then k, then v
    output: Any  # Linear: heads -> hidden_size
    gate_up: Any  # Linear: rows of gate, then up, or of up alone
    down: Any  # Linear: intermediate_size -> hidden_size
    # What is None is not computed.
    input_norm: Tensor | None = None  # [hidden_size]: of what attention reads
    input_norm_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [head_dim]: of each head; [num_heads * head_dim]: of all heads together
    k_norm: Tensor | None = None  # likewise
    attention_output_norm: Tensor | None = None  # [hidden_size]: of what attention adds to the residual stream
    post_attention_norm: Tensor | None = None  # [hidden_size]: of what the MLP reads
    post_attention_norm_bias: Tensor | None = None
    mlp_output_norm: Tensor | None = None  # [hidden_size]: of what the MLP adds
    rope_index: int = 0
    """Which rotary table the layer turns by."""

    @property
    def vectors(self) -> list[Tensor]:
        """Weights and biases of the norms."""
        return [value for value in vars(self).values() if isinstance(value, Tensor)]


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


class Penalties(Protocol):
    """Step 3 of engine/sampler.py, with what it has to remember of the rows. Rows without penalties cost nothing."""

    def put(self, row: int, params: SamplingParams, prompt_ids: np.ndarray, output_ids: np.ndarray) -> None:
        """A request gets the row, with the output that it has so far."""
        ...

    def clear(self, row: int) -> None:
        """The row is nobody's; also where it had no penalties."""
        ...

    def append(self, rows: np.ndarray, token_ids: Tensor) -> None:
        """The outputs of `rows` grew by one token each: int64 [rows], on the device."""
        ...

    def apply(self, logits: Tensor, rows: np.ndarray) -> None:
        """Change logits, float32 [len(rows), vocab_size], as the penalties of `rows` ask."""
        ...


class Ops(Protocol):
    """Layer operations of one network on one kind of machine."""

    def pack(self, name: str, weight: Tensor, bias: Tensor | None) -> Any:
        """A Linear in the machine's layout: `weight` [rows, columns], `bias` [rows]. Called from several threads."""
        ...

    packs_quantised: ClassVar[bool]
    """Whether there is `pack_quantised`; otherwise quantised weights have to be dequantised and packed."""

    def pack_quantised(self, name: str, weight: QuantisedWeight, bias: Tensor | None) -> Any:
        """As `pack`, for weights of 8 or 4 bits."""
        raise AssertionError(f"{name}: packs_quantised is false")

    packs_float8: ClassVar[bool]
    """Whether there is `pack_float8`."""

    def pack_float8(self, name: str, weight: Float8Weight, bias: Tensor | None) -> Any:
        """As `pack`, for a layer that rounds its input to float8 as well; rows and columns are multiples of 16."""
        raise AssertionError(f"{name}: packs_float8 is false")

    def bind(self, layer: LayerWeights) -> Any:
        """The layer in the form that the two operations below take; called once, when all is loaded."""
        ...

    embeds_from_head: ClassVar[bool]
    """Whether a tied head can be the `table` of `embed`, so that its weights are kept once."""

    def embed(self, token_ids: Tensor, table: Any) -> Tensor:
        """Rows of `table` [vocab_size, hidden_size] -> hidden [num_tokens, hidden_size]; later calls may reuse it."""
        ...

    def attention_input(self, hidden: Tensor, layer: Any, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Norm, QKV projection, QK-norm, rotary embedding; the layer has which norms there are.

        hidden [num_tokens, hidden_size], cos_sin float32 [num_tokens, head_dim] (cosines, then sines, of half a head)
        -> q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim]
        """
        ...

    def attention_output(self, hidden: Tensor, attention: Tensor, layer: Any) -> Tensor:
        """Output projection, its norm, + residual, then norm, MLP, its norm, + residual; see `LayerForm`.

        hidden [num_tokens, hidden_size], attention [num_tokens, num_heads, head_dim] -> [num_tokens, hidden_size]
        """
        ...

    def run_layers(
        self, hidden: Tensor, layers: list[Any], cos_sin: Tensor, wanted: Tensor, backend: AttentionBackend
    ) -> Tensor:
        """All layers, as `each_layer`: hidden [num_tokens, hidden_size] -> [rows, hidden_size]

        cos_sin float32 [ropes, num_tokens, head_dim], contiguous.
        """
        ...

    def logits(self, hidden: Tensor, norm_weight: Tensor, head: Any, norm_bias: Tensor | None = None) -> Tensor:
        """Norm and head: [rows, hidden_size] -> float32 [rows, vocab_size]"""
        ...

    def choose_tokens(self, logits: Tensor, choice: TokenChoice) -> tuple[Tensor, Tensor]:
        """Token ids int64 [rows], and the highest logit of each row, float32 [rows]: NaN where the row holds one.

        logits float32 [rows, vocab_size], overwritten. Ids mean nothing where the highest logit is not finite. On a GPU
        nothing is waited for.
        """
        ...

    def make_penalties(self, vocab_size: int, device: torch.device) -> Penalties:
        """For the rows of one batch, whose tokens `choose_tokens` gives."""
        ...


def each_layer(
    ops: Ops, hidden: Tensor, layers: list[Any], cos_sin: Tensor, wanted: Tensor, backend: AttentionBackend
) -> Tensor:
    """The layers one by one. Behind its attention, the last computes no more than the rows `wanted`: int64 [rows]."""
    for index, layer in enumerate(layers):
        q, k, v = ops.attention_input(hidden, layer, cos_sin[layer.rope_index])
        attention = backend.run(index, q, k, v)
        if index == len(layers) - 1:
            hidden, attention = hidden[wanted], attention[wanted]
        hidden = ops.attention_output(hidden, attention, layer)
    return hidden
