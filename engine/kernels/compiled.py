"""The layer operations in plain torch, made into kernels by torch.compile: on any device that it has a compiler for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from configs.errors import SettingsError

from .ops import LayerWeights
from .torch_ops import TorchLinear, TorchOps


class CompiledOps(TorchOps):
    """Compiled when first called: once for one token, and once for every other number of tokens."""

    def __init__(self, **shape: Any) -> None:
        super().__init__(**shape)
        self._attention_input = torch.compile(super().attention_input, dynamic=True)
        self._attention_output = torch.compile(super().attention_output, dynamic=True)

    def pack(self, name: str, weight: Tensor, bias: Tensor | None) -> TorchLinear:
        for tensor in (weight, bias):
            if tensor is not None:
                torch._dynamo.mark_static(tensor)
        return TorchLinear(weight, bias)

    def bind(self, layer: LayerWeights) -> LayerWeights:
        for vector in layer.vectors:
            torch._dynamo.mark_static(vector)
        return layer

    def attention_input(self, hidden: Tensor, layer: LayerWeights, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = _compiled(self._attention_input, hidden, layer, cos_sin)
        return q, k, v

    def attention_output(self, hidden: Tensor, attention: Tensor, layer: LayerWeights) -> Tensor:
        out: Tensor = _compiled(self._attention_output, hidden, attention, layer)
        return out


def _compiled(function: Callable[..., Any], *args: Any) -> Any:
    """Raises SettingsError where torch cannot compile: in the request that the engine answers before it is ready."""
    try:
        return function(*args)
    except TorchDynamoException as error:
        cause = getattr(error, "inner_exception", error)
        reason = f"{type(cause).__name__}: {cause}".partition("\n")[0]
        raise SettingsError(f"torch_compile: torch cannot compile on this machine ({reason}); leave it off") from error
