"""Rotary frequencies of every supported kind.

Legend: d = head_dim, or the part of it that turns; frequencies are per pair of elements, [d / 2]; L = the length of
the sequence that a token belongs to, on which the dynamic and longrope kinds depend.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .config import ModelConfig, RopeConfig


class RotaryTables:
    """What each layer's rotary embedding needs for the tokens of a step."""

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        self.embeddings = [RotaryEmbedding(config, device, rope) for rope in config.ropes]

    def __call__(self, positions: Tensor, rope_lengths: Tensor) -> Tensor:
        """positions, rope_lengths int64 [num_tokens] -> float32 [ropes, num_tokens, head_dim]: cosines, then sines.

        Elements of a head that do not turn are its last pairs, with an angle of 0.
        """
        tables = [embedding(positions, rope_lengths) for embedding in self.embeddings]
        return torch.stack(tables) if len(tables) > 1 else tables[0][None]


class RotaryEmbedding:
    """cos and sin per token; computed per step, so there is no table to outgrow."""

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu", rope: RopeConfig | None = None) -> None:
        rope = rope or config.rope
        self.rope = rope
        self.max_positions = config.max_position_embeddings
        rotary_dim = config.rotary_dim or config.head_dim
        self.num_still = (config.head_dim - rotary_dim) // 2  # pairs
        self.exponents = torch.arange(0, rotary_dim, 2, device=device).float() / rotary_dim  # [d / 2]
        self.attention_factor = attention_factor(rope, config.max_position_embeddings)
        self.inv_freq = inv_freq(rope, 1.0 / torch.pow(rope.theta, self.exponents), config.max_position_embeddings)

    def __call__(self, positions: Tensor, rope_lengths: Tensor) -> Tensor:
        """positions, rope_lengths int64 [num_tokens] -> float32 [num_tokens, head_dim]: cosines, then sines."""
        angles = positions[:, None].float() * self._inv_freq_at(rope_lengths)
        if not self.num_still:
            return torch.cat((angles.cos(), angles.sin()), dim=-1) * self.attention_factor
        still = angles.new_zeros(len(angles), self.num_still)
        turning = (angles.cos() * self.attention_factor, still + 1, angles.sin() * self.attention_factor, still)
        return torch.cat(turning, dim=-1)

    def _inv_freq_at(self, rope_lengths: Tensor) -> Tensor:
        """[d / 2], or [num_tokens, d / 2] for the kinds that depend on the length."""
        match self.rope.rope_type:
            case "longrope":
                original = self.rope.parameters["original_max_position_embeddings"]
                return self.inv_freq[(rope_lengths > original).long()]
            case "dynamic":
                # "NTK-aware": theta grows so that the lowest frequency spans L (d / (d - 2) makes it exact there).
                factor = self.rope.parameters["factor"]
                d = 2 * len(self.exponents)
                stretch = factor * rope_lengths.clamp(min=self.max_positions) / self.max_positions - (factor - 1)
                theta = self.rope.theta * torch.pow(stretch, d / (d - 2))
                return 1.0 / torch.pow(theta[:, None], self.exponents)
            case _:
                return self.inv_freq


def inv_freq(rope: RopeConfig, plain: Tensor, max_positions: int) -> Tensor:
    """`plain` frequencies [d / 2] as the kind changes them; longrope: [2, d / 2], for short and for long sequences."""
    match rope.rope_type:
        case "none":
            return torch.zeros_like(plain)
        case "linear":
            return plain / float(rope.parameters["factor"])
        case "llama3":
            return llama3_inv_freq(plain, rope.parameters)
        case "yarn":
            return yarn_inv_freq(plain, rope, max_positions)
        case "longrope":
            factors = (rope.parameters["short_factor"], rope.parameters["long_factor"])
            return plain / torch.tensor(factors, device=plain.device)
        case _:
            return plain


def llama3_inv_freq(inv_freq: Tensor, parameters: dict[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    factor, original = float(parameters["factor"]), float(parameters["original_max_position_embeddings"])
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = original * inv_freq / (2 * math.pi)  # full rotations within the original context
    kept: Tensor = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inv_freq / factor + kept * inv_freq


def yarn_inv_freq(inv_freq: Tensor, rope: RopeConfig, max_positions: int) -> Tensor:
    """YaRN's "NTK-by-parts" (arXiv 2309.00071, section 3.2): a ramp over dimensions instead of wavelengths."""
    parameters = rope.parameters
    original, half = parameters["original_max_position_embeddings"], len(inv_freq)

    def dimension_of(turns: float) -> float:
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(rope.theta)

    low = dimension_of(parameters.get("beta_fast") or 32)
    high = dimension_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low or 0.001
    stretched = ((torch.arange(half, device=inv_freq.device).float() - low) / width).clamp(0, 1)
    return stretched * inv_freq / yarn_factor(rope, max_positions) + (1 - stretched) * inv_freq


def yarn_factor(rope: RopeConfig, max_positions: int) -> float:
    """Context extension: given, or the ratio of the new context to the original one (longrope likewise)."""
    return float(rope.parameters.get("factor") or max_positions / rope.parameters["original_max_position_embeddings"])


def attention_factor(rope: RopeConfig, max_positions: int) -> float:
    """What cosines and sines are multiplied by, to keep the entropy of attention at longer contexts."""
    parameters = rope.parameters
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    factor = yarn_factor(rope, max_positions)
    if rope.rope_type == "longrope":
        original = parameters["original_max_position_embeddings"]
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return temperature(mscale) / temperature(mscale_all_dim) if mscale and mscale_all_dim else temperature(1.0)
