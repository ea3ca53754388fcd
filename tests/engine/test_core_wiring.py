"""What the core hands from the configuration to the scheduler, seen from its answers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.sampling import SamplingParams
from tests.engine.core_runs import add, finish, make_core, random_prompts, token_ids
from tests.engine.test_models_logits import MIXED, ROPES
from tests.engine.tiny_models import write_tiny

GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
WINDOW = {"head_dim": 16, "sliding_window": 20}


def greedy(model: Any, prompt: list[int]) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=False
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kinds", [MIXED, MIXED[:2] * 1 + ["full_attention"], ["sliding_attention"] * 3], ids=str)
def test_blocks_stay_as_long_as_a_layer_reads_them(tmp_path: Path, kinds: list[str]) -> None:
    """A window frees what is behind it only where every layer has it."""
    model = write_tiny(tmp_path, "ministral", layer_types=kinds, **WINDOW)
    core = make_core(tmp_path, block_size=8, kv_cache_tokens=1024)
    prompts = random_prompts(3, lengths=(90, 200))
    assert token_ids(core, prompts, GREEDY) == [greedy(model, prompt) for prompt in prompts]
    assert (core.scheduler.kv.sliding_window is None) == ("full_attention" in kinds)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_prefixes_are_shared_only_where_they_are_rotated_alike(tmp_path: Path, rope: str) -> None:
    """Frequencies that depend on a prompt's length make the keys of equal tokens differ."""
    model = write_tiny(tmp_path, rope_parameters=dict(ROPES[rope]), max_position_embeddings=128)
    core = make_core(tmp_path, block_size=16, max_model_len=128)
    [prompt] = random_prompts(1, lengths=(120, 120))
    short, long = prompt[:60], prompt[:85]
    if rope == "dynamic":
        core = make_core(tmp_path, block_size=16)
        [prompt] = random_prompts(1, lengths=(200, 200))
        short, long = prompt[:150], prompt
    for name, each in (("first", short), ("second", long)):
        add(core, name, each, GREEDY)
        output = finish(core)[name]
        assert output.num_cached_tokens == 0
        assert output.new_token_ids[:1] == greedy(model, each)[:1]
