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
        qkv = layer.qkv(self._norm(hidden, layer.input_norm))
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
            residual, normed = add_rms_norm(residual, delta, layer.input_norm, self.norm_eps)
            q = self._rotate(layer.qkv(normed), layer, cos_sin, cache_slots(backend, index))
            attention = backend.forward(index, q)
            if index == len(layers) - 1:
                residual, attention = residual[wanted], attention[wanted]
            residual, delta = self._behind_attention(residual, attention, layer)
        assert delta is not None  # there are layers
        return residual + delta

    def logits(self, hidden: Tensor, norm_weight: Tensor, head: Any) -> Tensor:
        if isinstance(head, QuantisedLinear):
            return head(self._norm(hidden, norm_weight), torch.float32)
        if not (hidden.is_cuda and len(hidden) and isinstance(head, TorchLinear) and head.bias is None):
            return super().logits(hidden, norm_weight, head)
        # The product's sums as they are: rounded to bfloat16, tokens of nearly the same logit would be equal.
        return torch.mm(self._norm(hidden, norm_weight), head.weight.t(), out_dtype=torch.float32)

    def choose_tokens(self, logits: Tensor, choice: TokenChoice) -> tuple[Tensor, Tensor]:
        return choose_tokens(logits, choice)

    def make_penalties(self, vocab_size: int, device: torch.device) -> CountedPenalties:
        return CountedPenalties(vocab_size, device)

    def _behind_attention(self, residual: Tensor, attention: Tensor, layer: LayerWeights) -> tuple[Tensor, Tensor]:
        """The residual stream in the middle of the layer, and what the layer's second half adds to it."""
        delta = layer.output(attention.flatten(1))
        residual, normed = add_rms_norm(residual, delta, layer.post_attention_norm, self.norm_eps)
        return residual, layer.down(gated(layer.gate_up(normed)))

    def _rotate(self, qkv: Tensor, layer: LayerWeights, cos_sin: Tensor, store: KVStore) -> Tensor:
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        return rotate_and_store(qkv, cos_sin, norms, self.norm_eps, self.heads, store)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.norm_eps)


def cache_slots(backend: PagedAttention, layer: int) -> KVStore:
    """The layer's cache, and where the step's tokens go in it."""
    cache = backend.cache
    key_scales, value_scales = (
        (cache.key_scales[layer], cache.value_scales[layer]) if backend.spec.has_scales else (None, None)
    )
    return KVStore(cache.keys[layer], cache.values[layer], key_scales, value_scales, backend.metadata.slot_mapping)
