"""`StepTensors`: what the network reads in one step, on the device."""

from dataclasses import dataclass

from torch import Tensor

from .attention.metadata import AttentionMetadata


@dataclass(frozen=True)
class StepTensors:
    """T tokens, packed request after request."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    rope_lengths: Tensor  # int64 [T], see `StepInputs`
    metadata: AttentionMetadata
