"""The oracle itself, against attention written out for one sequence at a time."""

import pytest
import torch

from engine.attention import torch_reference
from engine.attention.metadata import AttentionMetadata, AttentionSpec
from engine.attention.torch_reference import TorchReferenceAttention
from tests.engine.attention_runs import make_spec, run_steps

HEADS, GROUPS, DIM, BLOCK = 6, 2, 8, 4


def spec(dtype: torch.dtype = torch.float32, window: int | None = None) -> AttentionSpec:
    return make_spec(head_dim=DIM, block_size=BLOCK, windows=(None, window), dtype=dtype)


@pytest.mark.parametrize("window", [None, 1, 3, 5])
@pytest.mark.parametrize("workspace", [1, 500, 2**24])
def test_mixed_steps_equal_dense_attention(monkeypatch: pytest.MonkeyPatch, workspace: int, window: int | None) -> None:
    monkeypatch.setattr(torch_reference, "WORKSPACE_ELEMENTS", workspace)
    steps = [[13, 4, 1], [1, 5, 1], [1, 0, 7], [6, 1, 1], [1, 1, 1]]
    assert run_steps(TorchReferenceAttention(spec(window=window)), spec(window=window), steps) < 1e-5


def test_negative_slots_are_not_stored() -> None:
    backend = TorchReferenceAttention(spec())
    cache = backend.allocate(3)
    one = torch.ones(3, GROUPS, DIM)
    metadata = AttentionMetadata.from_host(
        query_start_loc=torch.tensor([0, 3]).int().numpy(),
        seq_lens=torch.tensor([3]).int().numpy(),
        block_table=torch.tensor([[1]]).int().numpy(),
        slot_mapping=torch.tensor([4, -1, 6]).numpy(),
    )
    backend.prepare(metadata)
    backend.run(0, torch.ones(3, HEADS, DIM), one, one)
    assert cache.keys[0].flatten(0, 1)[:, 0, 0].tolist() == [0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0]
    assert not cache.keys[1].any()


def test_keeps_the_type_of_the_query() -> None:
    backend = TorchReferenceAttention(spec(torch.bfloat16))
    backend.allocate(2)
    metadata = AttentionMetadata.from_host(
        query_start_loc=torch.tensor([0, 1]).int().numpy(),
        seq_lens=torch.tensor([1]).int().numpy(),
        block_table=torch.tensor([[1]]).int().numpy(),
        slot_mapping=torch.tensor([4]).numpy(),
    )
    backend.prepare(metadata)
    v = torch.randn(1, GROUPS, DIM).bfloat16()
    out = backend.run(0, torch.randn(1, HEADS, DIM).bfloat16(), v, v)
    assert torch.equal(out, v.repeat_interleave(HEADS // GROUPS, dim=1))


def test_block_bytes_counts_keys_and_values_of_all_layers() -> None:
    backend = TorchReferenceAttention(spec())
    cache = backend.allocate(10)
    assert sum(tensor.nbytes for tensor in (*cache.keys, *cache.values)) == 10 * spec().block_bytes
