"""KV may be shared between requests exactly where their rotary frequencies are equal."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine.checkpoints import open_checkpoint
from engine.models.config import ModelConfig, RopeConfig, rope_cache_key
from engine.models.rope import RotaryEmbedding
from tests.engine.test_models_logits import ROPES
from tests.engine.tiny_models import write_tiny

LENGTHS = [1, 63, 64, 65, 127, 128, 129, 130, 300]


def config_of(folder: Path, rope: dict[str, Any]) -> ModelConfig:
    write_tiny(folder, rope_parameters=dict(rope), max_position_embeddings=128)
    return open_checkpoint(folder).config


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_equal_keys_exactly_where_frequencies_are_equal(tmp_path: Path, rope: str) -> None:
    config = config_of(tmp_path, ROPES[rope])
    rotary, position = RotaryEmbedding(config), torch.tensor([17])
    cos_sin = {length: rotary(position, torch.tensor([length])) for length in LENGTHS}
    for a in LENGTHS:
        for b in LENGTHS:
            same = torch.equal(cos_sin[a], cos_sin[b])
            assert (rope_cache_key(config, a) == rope_cache_key(config, b)) == same


def test_key_is_empty_for_static_kinds_and_short_prompts(tmp_path: Path) -> None:
    assert rope_cache_key(config_of(tmp_path / "a", ROPES["yarn"]), 1000) == ""
    assert rope_cache_key(config_of(tmp_path / "b", ROPES["longrope"]), 64) == ""
    equal = ROPES["longrope"] | {"long_factor": ROPES["longrope"]["short_factor"]}
    assert rope_cache_key(config_of(tmp_path / "c", equal), 65) == ""


def test_every_table_of_a_network_counts(tmp_path: Path) -> None:
    plain = config_of(tmp_path, ROPES["default"])
    dynamic = RopeConfig(rope_type="dynamic", parameters={"factor": 2.0})
    assert rope_cache_key(plain, 1000) == ""
    assert rope_cache_key(replace(plain, other_ropes=(dynamic,)), 1000) == "rope-length=1000"
    assert rope_cache_key(replace(plain, rope=dynamic, other_ropes=(dynamic,)), 1000).count("rope-length=1000") == 2
