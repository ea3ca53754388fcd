"""Checkpoints of random weights that lie on no disk: their tensors are parts of one piece of memory."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from engine.checkpoints import Checkpoint, StoredTensor, TokenizerFiles
from engine.checkpoints.hf_config import find_architecture, parse_config
from engine.weights.mapping import modules

NOWHERE = Path("random")
NOISE_ELEMENTS = 2**24
"""Drawn; a larger tensor repeats them."""
OFFSETS = 2**16
"""Tensors begin at so many different elements."""


def random_checkpoint(raw: dict[str, Any], deviation: float = 0.02) -> Checkpoint:
    """For the content of a config.json. bfloat16 of this standard deviation; norms are ones."""
    file = Path("config.json")
    config, _ = parse_config(find_architecture(raw, file), file, "bfloat16", has_head=True)
    shapes = {name: shape for module in modules(config) for name, shape in module.tensors()}
    most = max(map(math.prod, shapes.values())) + OFFSETS
    drawn = torch.randn(min(most, NOISE_ELEMENTS), generator=torch.Generator().manual_seed(0)) * deviation
    noise = np.resize(drawn.bfloat16().view(torch.uint8).numpy(), 2 * most)
    ones = torch.ones(max(config.hidden_size, config.head_dim)).bfloat16().view(torch.uint8).numpy()

    def stored(index: int, name: str, shape: tuple[int, ...]) -> StoredTensor:
        begin = 0 if name.endswith("norm.weight") else 2 * (7919 * index % OFFSETS)
        data = (ones if name.endswith("norm.weight") else noise)[begin : begin + 2 * math.prod(shape)]
        return StoredTensor(name, NOWHERE, name, shape, "BF16", len(data), lambda: data)

    tensors = {name: stored(index, name, shape) for index, (name, shape) in enumerate(shapes.items())}
    return Checkpoint(NOWHERE, "random", config, {}, (), TokenizerFiles(NOWHERE, {}), {}, tensors)


@contextmanager
def served(raw: dict[str, Any], deviation: float = 0.02) -> Iterator[Checkpoint]:
    """Whatever model a core is asked for meanwhile, it gets random weights of this shape: the checkpoint."""
    checkpoint = random_checkpoint(raw, deviation)
    with patch("engine.start.open_checkpoint", lambda path: checkpoint):
        yield checkpoint
