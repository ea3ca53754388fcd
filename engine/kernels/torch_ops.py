"""The layer operations in plain torch: complete on every device, and the oracle for the other implementations."""

from collections.abc import Callable
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.metadata import AttentionBackend
from engine.models.config import Activation, LayerForm

from .ops import LayerWeights, Ops, Penalties, TokenChoice, each_layer
from .penalties import SparsePenalties
from .torch_sampling import choose_tokens

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


class TorchLinear(NamedTuple):
    weight: Tensor  # [rows, columns]
    bias: Tensor | None  # [rows]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class OneDNNLinear(NamedTuple):
    """A linear layer whose weight lies in oneDNN's blocked layout: up to twice as fast for a few rows."""

    weight: Tensor  # opaque
    bias: Tensor | None  # [rows]

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out


def onednn_packs(weight: Tensor) -> bool:
    """Whether torch can lay out `weight` for this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class TorchOps(Ops):
    """See `Ops` for shapes. Norms, rotary embedding and softmax are computed in float32."""

    packs_quantised: ClassVar[bool] = False
    packs_float8: ClassVar[bool] = False
    embeds_from_head: ClassVar[bool] = False

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, norm_eps: float, form: LayerForm | None = None
    ) -> None:
        self.heads = (num_heads, num_kv_heads, num_kv_heads)
        self.head_dim = head_dim
        self.norm_eps = norm_eps
        self.form = form or LayerForm()

    def pack(self, name: str, weight: Tensor, bias: Tensor | None) -> TorchLinear | OneDNNLinear:
        if onednn_packs(weight):
            return OneDNNLinear(torch.ops.mkldnn._reorder_linear_weight(weight), bias)
        return TorchLinear(weight, bias)

    def bind(self, layer: LayerWeights) -> LayerWeights:
        return layer

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(token_ids, table)

    def attention_input(self, hidden: Tensor, layer: LayerWeights, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = layer.qkv(self._norm_of(hidden, layer.input_norm, layer.input_norm_bias))
        q, k, v = qkv.view(len(hidden), sum(self.heads), self.head_dim).split(self.heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = (
                self._norm(x.reshape(len(x), -1, len(norm)), norm).view(x.shape)
                for x, norm in ((q, layer.q_norm), (k, layer.k_norm))
            )
        return rotate(q, cos_sin), rotate(k, cos_sin), v

    def attention_output(self, hidden: Tensor, attention: Tensor, layer: LayerWeights) -> Tensor:
        added = self._normed(layer.output(attention.flatten(1)), layer.attention_output_norm)
        middle = hidden + added
        read = hidden if self.form.is_parallel else middle
        read = self._norm_of(read, layer.post_attention_norm, layer.post_attention_norm_bias)
        return middle + self._normed(layer.down(self._activated(layer.gate_up(read))), layer.mlp_output_norm)

    def run_layers(
        self, hidden: Tensor, layers: list[LayerWeights], cos_sin: Tensor, wanted: Tensor, backend: AttentionBackend
    ) -> Tensor:
        return each_layer(self, hidden, layers, cos_sin, wanted, backend)

    def logits(
        self, hidden: Tensor, norm_weight: Tensor, head: TorchLinear | OneDNNLinear, norm_bias: Tensor | None = None
    ) -> Tensor:
        logits: Tensor = head(self._norm_of(hidden, norm_weight, norm_bias))
        return logits.float()

    def choose_tokens(self, logits: Tensor, choice: TokenChoice) -> tuple[Tensor, Tensor]:
        return choose_tokens(logits, choice)

    def make_penalties(self, vocab_size: int, device: torch.device) -> Penalties:
        return SparsePenalties()

    def _activated(self, gate_up: Tensor) -> Tensor:
        activation = ACTIVATIONS[self.form.activation]
        if not self.form.is_gated:
            return activation(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    def _norm_of(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The network's kind of norm over the last dimension; without a weight x itself."""
        if weight is None or not self.form.layer_norm:
            return self._normed(x, weight)
        weights = weight.float(), None if bias is None else bias.float()
        return F.layer_norm(x.float(), list(weight.shape), *weights, self.norm_eps).to(x.dtype)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._norm(x, weight)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root mean square norm over the last dimension (arXiv 1910.07467)."""
        normed: Tensor = F.rms_norm(x.float(), list(weight.shape), weight.float(), self.norm_eps)
        return normed.to(x.dtype)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary embedding of x [num_tokens, heads, head_dim]; element i pairs with i + head_dim / 2."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, head_dim / 2]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
