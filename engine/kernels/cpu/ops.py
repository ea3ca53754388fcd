"""`Ops` by the C++ kernels: one call and one parallel region for all layers. Float32 or bfloat16 weights.

The residual stream is float32 whatever the weights are. Sums run in a fixed order, so a token's result does not
depend on which other tokens are in the step.
"""

import ctypes
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.cpu import CPUAttention
from engine.attention.metadata import AttentionBackend, KVCache
from engine.kernels.ops import LayerWeights, Ops, TokenChoice, each_layer
from engine.kernels.penalties import SparsePenalties
from engine.kernels.quantised import QuantisedWeight
from engine.models.config import Activation, LayerForm

from .build import load_library

LANES = 16
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)  # in the order of norms.h
POINTER, LONG, FLOAT, INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int


class CPULinear(NamedTuple):
    """Packed weight, see matmul.h and quantised.h."""

    data: Tensor
    scale: Tensor | None
    minimum: Tensor | None
    bias: Tensor | None  # float32 [rows], in the packed order
    rows: int
    columns: int
    padded_columns: int
    bits: int  # 0: float weights


class _Linear(ctypes.Structure):
    """`Linear` of layer.cpp."""

    _fields_ = (
        *((name, POINTER) for name in ("weight", "scale", "minimum", "bias")),
        *((name, LONG) for name in ("n", "k", "bits")),
    )


class _LayerWeights(ctypes.Structure):
    """`LayerWeights` of layer.cpp."""

    _fields_ = (
        *((name, LONG) for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")),
        ("rope", LONG),
        ("eps", FLOAT),
        *((name, INT) for name in ("num_threads", "layer_norm", "parallel", "activation", "gated", "full_qk_norm")),
        *((name, POINTER) for name in ("input_norm", "input_norm_bias", "post_norm", "post_norm_bias")),
        *((name, POINTER) for name in ("q_norm", "k_norm", "attention_norm", "mlp_norm")),
        *((name, _Linear) for name in ("qkv", "output", "gate_up", "down")),
    )


class _Scratch(ctypes.Structure):
    """`Scratch` of layer.cpp."""

    _fields_ = tuple((name, POINTER) for name in ("normed", "qkv", "activation", "rounded", "q", "k", "v", "delta"))


class _Layer(ctypes.Structure):
    """`Layer` of layer.cpp."""

    _fields_ = (
        *((name, POINTER) for name in ("weights", "attention", "k_cache", "v_cache")),
        *(("scale", FLOAT), ("softcap", FLOAT), ("window", LONG)),
    )


class _Sampling(ctypes.Structure):
    """`Sampling` of sampling.cpp."""

    _fields_ = (
        *(("logits", POINTER), ("rows", LONG), ("vocab", LONG)),
        *((name, POINTER) for name in ("temperature", "min_p", "top_p", "top_k", "u", "token_ids", "highest")),
        ("num_threads", INT),
    )


class _BoundLayer(NamedTuple):
    address: int
    rope_index: int
    keep_alive: tuple[object, ...]


@dataclass(frozen=True)
class _Layers:
    """The layers' weights together with the cache that they use."""

    cache: KVCache
    array: ctypes.Array[_Layer]


class CPUOps(Ops):
    """See `Ops` for shapes. `hidden` is float32 and updated in place; the next call overwrites q, k, v and logits."""

    packs_quantised: ClassVar[bool] = True
    packs_float8: ClassVar[bool] = False
    embeds_from_head: ClassVar[bool] = True

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm_eps: float,
        dtype: torch.dtype,
        form: LayerForm | None = None,
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.norm_eps, self.dtype, self.form = norm_eps, dtype, form or LayerForm()
        self.num_threads = torch.get_num_threads()
        self.scratch, self.buffers = _Scratch(), [torch.empty(0, 0)]
        self.bound: _Layers | None = None
        self.logits_buffers = [torch.empty(0, 0)] * 3
        library, name = load_library(), str(dtype).removeprefix("torch.")
        self._pack = getattr(library, f"pack_{name}")
        self._pack.argtypes = [POINTER, POINTER, LONG, LONG, LONG, INT]
        self._pack_quantised = library.pack_quantised
        self._pack_quantised.argtypes = [POINTER] * 6 + [LONG, LONG, INT, INT]
        self._attention_input = getattr(library, f"attention_input_{name}")
        self._attention_input.argtypes = [POINTER] * 4 + [LONG]
        self._attention_output = getattr(library, f"attention_output_{name}")
        self._attention_output.argtypes = [POINTER] * 4 + [LONG]
        self._run_layers = getattr(library, f"layers_{name}")
        self._run_layers.argtypes = [POINTER, LONG] + [POINTER] * 4 + [LONG, POINTER, LONG]
        self._logits = getattr(library, f"logits_{name}")
        self._logits.argtypes = [POINTER, POINTER, ctypes.POINTER(_Linear)] + [POINTER] * 3 + [LONG]
        self._embed = getattr(library, f"embed_{name}")
        self._embed.argtypes = [ctypes.POINTER(_Linear), POINTER, POINTER, LONG, LONG, INT]
        self._sample = library.sample
        self._sample.argtypes = [ctypes.POINTER(_Sampling)]

    def pack(self, name: str, weight: Tensor, bias: Tensor | None) -> CPULinear:
        columns = weight.shape[1]
        weight = weight.to(self.dtype)
        weight = self._in_order(name, weight)
        bias = None if bias is None else self._in_order(name, bias)
        # The down projection reads activations whose rows are padded to whole panels.
        padded = _round_up(columns, LANES if name == "down" else 2)
        data = torch.empty(_round_up(weight.shape[0], LANES) * padded, dtype=self.dtype)
        weight = weight.contiguous()
        self._pack(weight.data_ptr(), data.data_ptr(), weight.shape[0], columns, padded, 1)
        rows = weight.shape[0]
        return CPULinear(data, None, None, None if bias is None else bias.float(), rows, columns, padded, 0)

    def pack_quantised(self, name: str, weight: QuantisedWeight, bias: Tensor | None) -> CPULinear:
        q, scale, minimum = (self._in_order(name, part) for part in (weight.q, weight.scale, weight.minimum))
        bias = None if bias is None else self._in_order(name, bias)
        rows, columns = q.shape
        padded = _round_up(rows, LANES)
        packed = (
            torch.empty(padded * columns * weight.bits // 8, dtype=torch.uint8),
            *(torch.empty(padded * scale.shape[1], dtype=torch.float16) for _ in range(2)),
        )
        sources = [x.contiguous() for x in (q, scale, minimum)]
        addresses = (x.data_ptr() for x in (*sources, *packed))
        self._pack_quantised(*addresses, rows, columns, weight.bits, 1)
        data, packed_scale, packed_minimum = packed
        symmetric = torch.equal(minimum, scale * -(2 ** (weight.bits - 1)))
        return CPULinear(
            data,
            packed_scale,
            None if symmetric else packed_minimum,
            None if bias is None else bias.float(),
            *(rows, columns, columns),
            weight.bits,
        )

    def bind(self, layer: LayerWeights) -> _BoundLayer:
        linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
        norms = [
            *(layer.input_norm, layer.input_norm_bias, layer.post_attention_norm, layer.post_attention_norm_bias),
            *(layer.q_norm, layer.k_norm, layer.attention_output_norm, layer.mlp_output_norm),
        ]
        norms = [None if norm is None else norm.float().contiguous() for norm in norms]
        intermediate_size = layer.gate_up.rows // (2 if self.form.is_gated else 1)
        struct = _LayerWeights(
            *(layer.output.rows, intermediate_size, self.num_heads, self.num_kv_heads, self.head_dim),
            *(layer.rope_index, self.norm_eps, self.num_threads, self.form.layer_norm, self.form.is_parallel),
            *(ACTIVATIONS.index(self.form.activation), self.form.is_gated),
            layer.q_norm is not None and len(layer.q_norm) != self.head_dim,
            *(_address(norm) for norm in norms),
            *(_linear(linear) for linear in linears),
        )
        return _BoundLayer(ctypes.addressof(struct), layer.rope_index, (struct, linears, norms))

    def embed(self, token_ids: Tensor, table: Tensor | CPULinear) -> Tensor:
        if isinstance(table, Tensor):
            return F.embedding(token_ids, table).float()
        out = torch.empty(len(token_ids), table.columns)
        self._embed(_linear(table), token_ids.data_ptr(), out.data_ptr(), *out.shape, self.num_threads)
        return out

    def attention_input(self, hidden: Tensor, layer: _BoundLayer, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens, scratch = len(hidden), self._scratch(len(hidden), layer)
        self._attention_input(layer.address, scratch, hidden.data_ptr(), cos_sin.data_ptr(), num_tokens)
        q, k, v = (buffer[:num_tokens].view(num_tokens, -1, self.head_dim) for buffer in self.buffers[-4:-1])
        return q, k, v

    def attention_output(self, hidden: Tensor, attention: Tensor, layer: _BoundLayer) -> Tensor:
        scratch = self._scratch(len(hidden), layer)
        self._attention_output(layer.address, scratch, hidden.data_ptr(), attention.data_ptr(), len(hidden))
        return hidden

    def run_layers(
        self, hidden: Tensor, layers: list[_BoundLayer], cos_sin: Tensor, wanted: Tensor, backend: AttentionBackend
    ) -> Tensor:
        if not isinstance(backend, CPUAttention):
            return each_layer(self, hidden, layers, cos_sin, wanted, backend)
        if self.bound is None or self.bound.cache is not backend.cache:
            calls = (_Layer(layer.address, *backend.layer_arguments(index)) for index, layer in enumerate(layers))
            self.bound = _Layers(backend.cache, (_Layer * len(layers))(*calls))
        self._run_layers(
            *(self.bound.array, len(layers), self._scratch(len(hidden), layers[0])),
            *(hidden.data_ptr(), cos_sin.data_ptr(), backend.step_out.data_ptr(), len(hidden)),
            *(wanted.data_ptr(), len(wanted)),
        )
        return hidden[: len(wanted)]

    def logits(self, hidden: Tensor, norm_weight: Tensor, head: CPULinear, norm_bias: Tensor | None = None) -> Tensor:
        rows, hidden_size = hidden.shape
        norms = [None if norm is None else norm.float() for norm in (norm_weight, norm_bias)]
        out, normed, rounded = self.logits_buffers
        if len(out) < rows or out.shape[1] != head.rows:
            out = torch.empty(rows, head.rows)
            normed = torch.zeros(rows, head.padded_columns, dtype=self.dtype)
            rounded = torch.empty(rows, _rounded_bytes(hidden_size), dtype=torch.uint8)
            self.logits_buffers = [out, normed, rounded]
        norm = _LayerWeights(
            hidden_size=hidden_size, eps=self.norm_eps, num_threads=self.num_threads, layer_norm=self.form.layer_norm
        )
        norm.input_norm, norm.input_norm_bias = map(_address, norms)
        self._logits(
            *(hidden.data_ptr(), ctypes.addressof(norm), _linear(head), normed.data_ptr(), rounded.data_ptr()),
            *(out.data_ptr(), rows),
        )
        return out[:rows]

    def choose_tokens(self, logits: Tensor, choice: TokenChoice) -> tuple[Tensor, Tensor]:
        rows, vocab = logits.shape
        token_ids, highest = np.empty(rows, np.int64), np.empty(rows, np.float32)
        arrays = (choice.temperature, choice.min_p, choice.top_p, choice.top_k, choice.u, token_ids, highest)
        addresses = (array.ctypes.data for array in arrays)
        self._sample(_Sampling(logits.data_ptr(), rows, vocab, *addresses, self.num_threads))
        return torch.from_numpy(token_ids), torch.from_numpy(highest)

    def make_penalties(self, vocab_size: int, device: torch.device) -> SparsePenalties:
        return SparsePenalties()

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        """Rows of a linear layer as `attention_output` of layer.cpp wants them."""
        if name != "gate_up":
            return rows
        return _interleave(rows) if self.form.is_gated else _padded(rows)

    def _scratch(self, num_tokens: int, layer: _BoundLayer) -> int:
        """Address of buffers for so many tokens; each layer overwrites them."""
        if num_tokens > len(self.buffers[0]):
            weights = _LayerWeights.from_address(layer.address)
            heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
            widths = (
                (_round_up(weights.hidden_size, 2), self.dtype),  # normed
                (_round_up(sum(heads) * self.head_dim, LANES), torch.float32),  # qkv
                (_round_up(weights.intermediate_size, LANES), self.dtype),  # activation
                (_rounded_bytes(max(weights.hidden_size, weights.output.k, weights.down.k)), torch.uint8),  # rounded
                *((count * self.head_dim, self.dtype) for count in heads),  # q, k, v
                (weights.hidden_size if weights.attention_norm or weights.mlp_norm else 0, torch.float32),  # delta
            )
            self.buffers = [torch.zeros(num_tokens, width, dtype=dtype) for width, dtype in widths]
            self.scratch = _Scratch(*(buffer.data_ptr() for buffer in self.buffers))
        return ctypes.addressof(self.scratch)


def _padded(rows: Tensor) -> Tensor:
    """With zeros, to whole panels."""
    return F.pad(rows, (*[0, 0] * (rows.dim() - 1), 0, -len(rows) % LANES))


def _interleave(gate_up: Tensor) -> Tensor:
    """Rows of gate, then up -> sixteen of gate, the sixteen of up that they meet, and so on; padded with zeros."""
    gate, up = (_padded(half).unflatten(0, (-1, LANES)) for half in gate_up.chunk(2))
    return torch.stack((gate, up), dim=1).flatten(0, 2)


def _rounded_bytes(columns: int) -> int:
    """Of one row of activations in quantised.h: a byte per element, a scale and two sums per group of 32."""
    return columns + 12 * (columns // 32)


def _linear(linear: CPULinear) -> _Linear:
    addresses = (_address(x) for x in (linear.data, linear.scale, linear.minimum, linear.bias))
    return _Linear(*addresses, linear.rows, linear.padded_columns, linear.bits)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
