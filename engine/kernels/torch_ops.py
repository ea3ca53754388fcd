"""The layer operations in plain torch: complete on every device, and the oracle for the other implementations."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .ops import LayerWeights


class TorchLinear(NamedTuple):
    weight: Tensor  # [rows, columns]
    bias: Tensor | None  # [rows]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class TorchOps:
    """See `Ops` for shapes. Norms, rotary embedding and softmax are computed in float32."""

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, norm_eps: float) -> None:
        self.heads = (num_heads, num_kv_heads, num_kv_heads)
        self.head_dim = head_dim
        self.norm_eps = norm_eps

    def pack(self, name: str, weight: Tensor, bias: Tensor | None) -> TorchLinear:
        return TorchLinear(weight, bias)

    def bind(self, layer: LayerWeights) -> LayerWeights:
        return layer

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(token_ids, table)

    def attention_input(
        self, hidden: Tensor, layer: LayerWeights, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = layer.qkv(self._norm(hidden, layer.input_norm))
        q, k, v = qkv.view(len(hidden), sum(self.heads), self.head_dim).split(self.heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        return rotate(q, cos_sin), rotate(k, cos_sin), v

    def attention_output(self, hidden: Tensor, attention: Tensor, layer: LayerWeights) -> Tensor:
        hidden = hidden + layer.output(attention.flatten(1))
        gate, up = layer.gate_up(self._norm(hidden, layer.post_attention_norm)).chunk(2, dim=-1)
        return hidden + layer.down(F.silu(gate) * up)

    def logits(self, hidden: Tensor, norm_weight: Tensor, head: TorchLinear) -> Tensor:
        return head(self._norm(hidden, norm_weight)).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root mean square norm over the last dimension (arXiv 1910.07467)."""
        return F.rms_norm(x.float(), weight.shape, weight.float(), self.norm_eps).to(x.dtype)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary embedding of x [num_tokens, heads, head_dim]; element i pairs with i + head_dim / 2."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, head_dim / 2]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
