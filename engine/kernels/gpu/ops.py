"""`Ops` on NVIDIA GPUs: Triton kernels around cuBLAS's matrix products; nine launches a layer with attention's own.

The residual stream is float32 whatever the weights are, as on the CPU: what a layer adds is rounded, what many layers
have added is not. It costs a hundredth of a long prompt's time at most (the products take the rest), nothing in a
decode, where the stream stays in the L2 cache.

Nothing waits for the device and nothing depends on what tensors hold, so all of it can be captured in a CUDA graph.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.attention.metadata import AttentionBackend
from engine.attention.paged import PagedAttention
from engine.kernels.ops import LayerWeights, TokenChoice, each_layer
from engine.kernels.quantised import Float8Weight, QuantisedWeight
from engine.kernels.torch_ops import TorchLinear, TorchOps

from .float8 import Float8Linear
from .layers import KVStore, add_rms_norm, gated, rms_norm, rotate_and_store
from .penalties import CountedPenalties
from .quantised import PackedWeight, QuantisedLinear
from .sampling import choose_tokens


class TritonOps(TorchOps):
    """See `Ops` for shapes; `hidden` is float32 behind the embedding, and no argument is overwritten.

    Batch invariance: the kernels here give a token the same bits in any step. cuBLAS chooses a product's kernel, and
    with it the order of its sums, by the number of rows: a token has the same bits in any two steps of equally many
    tokens (all replays of one CUDA graph, say), but may differ in the last bits between steps of different sizes.
    """

    packs_quantised: ClassVar[bool] = True
    packs_float8: ClassVar[bool] = True

    def pack_quantised(self, name: str, weight: QuantisedWeight, bias: Tensor | None) -> QuantisedLinear:
        return QuantisedLinear(PackedWeight.pack(weight), bias)

    def pack_float8(self, name: str, weight: Float8Weight, bias: Tensor | None) -> Float8Linear:
        return Float8Linear(weight.numbers, weight.scale, bias)

    def attention_input(self, hidden: Tensor, layer: LayerWeights, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = layer.qkv(self._add_norm(hidden, None, layer, layer.input_norm, layer.input_norm_bias)[1])
        k, v = (qkv.new_empty(len(hidden), self.heads[1], self.head_dim) for _ in "kv")
        return self._rotate(qkv, layer, cos_sin, KVStore(k, v)), k, v

    def attention_output(self, hidden: Tensor, attention: Tensor, layer: LayerWeights) -> Tensor:
        residual, delta = self._behind_attention(hidden, attention, layer)
        return residual + delta

    def run_layers(
        self, hidden: Tensor, layers: list[LayerWeights], cos_sin: Tensor, wanted: Tensor, backend: AttentionBackend
    ) -> Tensor:
        """What a layer adds to the residual stream is added by the next one's norm."""
        if not isinstance(backend, PagedAttention):
            return each_layer(self, hidden, layers, cos_sin, wanted, backend)
        residual: Tensor = hidden
        delta: Tensor | None = None
        for index, layer in enumerate(layers):
            residual, normed = self._add_norm(residual, delta, layer, layer.input_norm, layer.input_norm_bias)
            q = self._rotate(layer.qkv(normed), layer, cos_sin[layer.rope_index], cache_slots(backend, index))
            attention = backend.forward(index, q)
            if index == len(layers) - 1:
                residual, attention = residual[wanted], attention[wanted]
            residual, delta = self._behind_attention(residual, attention, layer)
        assert delta is not None  # there are layers
        return residual + delta

    def logits(self, hidden: Tensor, norm_weight: Tensor, head: Any, norm_bias: Tensor | None = None) -> Tensor:
        if isinstance(head, QuantisedLinear):
            return head(self._norm_of(hidden, norm_weight, norm_bias), torch.float32)
        if not (hidden.is_cuda and len(hidden) and isinstance(head, TorchLinear) and head.bias is None):
            return super().logits(hidden, norm_weight, head, norm_bias)
        # The product's sums as they are: rounded to bfloat16, tokens of nearly the same logit would be equal.
        return torch.mm(self._norm_of(hidden, norm_weight, norm_bias), head.weight.t(), out_dtype=torch.float32)

    def choose_tokens(self, logits: Tensor, choice: TokenChoice) -> tuple[Tensor, Tensor]:
        return choose_tokens(logits, choice)

    def make_penalties(self, vocab_size: int, device: torch.device) -> CountedPenalties:
        return CountedPenalties(vocab_size, device)

    def _behind_attention(self, residual: Tensor, attention: Tensor, layer: LayerWeights) -> tuple[Tensor, Tensor]:
        """The residual stream in the middle of the layer, and what the layer's second half adds to it."""
        delta = self._normed(layer.output(attention.flatten(1)), layer.attention_output_norm)
        norms = layer.post_attention_norm, layer.post_attention_norm_bias
        if self.form.is_parallel:
            normed, residual = self._add_norm(residual, None, layer, *norms)[1], residual.float() + delta
        else:
            residual, normed = self._add_norm(residual, delta, layer, *norms)
        return residual, self._normed(layer.down(self._activated(layer.gate_up(normed))), layer.mlp_output_norm)

    def _activated(self, gate_up: Tensor) -> Tensor:
        return gated(gate_up, self.form.activation) if self.form.is_gated else super()._activated(gate_up)

    def _rotate(self, qkv: Tensor, layer: LayerWeights, cos_sin: Tensor, store: KVStore) -> Tensor:
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        if norms is not None and len(norms[0]) != self.head_dim:  # of all heads together
            widths = [count * self.head_dim for count in self.heads]
            q, k, v = qkv.split(widths, dim=1)
            qkv, norms = torch.cat((self._norm(q, norms[0]), self._norm(k, norms[1]), v), dim=1), None
        return rotate_and_store(qkv, cos_sin, norms, self.norm_eps, self.heads, store)

    def _add_norm(
        self, residual: Tensor, delta: Tensor | None, layer: LayerWeights, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """residual + delta in float32, and its norm, if the layer has one, in the type of the layer's norms."""
        if weight is not None and not self.form.layer_norm:
            return add_rms_norm(residual, delta, weight, self.norm_eps)
        residual = residual if delta is None else residual.float() + delta
        return residual, self._norm_of(residual, weight, bias).to(layer.vectors[0].dtype)

    def _norm_of(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        normed = super()._norm_of(x, weight, bias)
        return normed if weight is None else normed.to(weight.dtype)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.norm_eps)


def cache_slots(backend: PagedAttention, layer: int) -> KVStore:
    """The layer's cache, and where the step's tokens go in it."""
    cache = backend.cache
    key_scales, value_scales = (
        (cache.key_scales[layer], cache.value_scales[layer]) if backend.spec.has_scales else (None, None)
    )
    return KVStore(cache.keys[layer], cache.values[layer], key_scales, value_scales, backend.metadata.slot_mapping)
