"""The oracle itself, against attention written out for one sequence at a time."""

import pytest
import torch
from torch import Tensor

from configs.errors import SettingsError
from engine.attention import BACKENDS, select_backend, torch_reference
from engine.attention.metadata import AttentionMetadata, AttentionSpec
from engine.attention.torch_reference import TorchReferenceAttention

HEADS, GROUPS, DIM, BLOCK = 6, 2, 8, 4


def spec(dtype: torch.dtype = torch.float32, window: int | None = None) -> AttentionSpec:
    return AttentionSpec(
        num_heads=HEADS,
        num_kv_heads=GROUPS,
        head_dim=DIM,
        dtype=dtype,
        device=torch.device("cpu"),
        block_size=BLOCK,
        windows=(None, window),
        scale=DIM**-0.5,
    )


def dense(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """q [Q, H, d] are the last queries of k, v [K, G, d]."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = (distance < 0) | (distance >= (window or len(k)))
    scores = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def run_steps(steps: list[list[int]], window: int | None) -> None:
    """`steps[i][s]`: new tokens of sequence s in step i. Every step is compared with dense attention."""
    generator = torch.Generator().manual_seed(0)
    num_seqs, total = len(steps[0]), [sum(step[s] for step in steps) for s in range(len(steps[0]))]
    q, k, v = ([torch.randn(n, heads, DIM, generator=generator) for n in total] for heads in (HEADS, GROUPS, GROUPS))
    max_blocks = -(-max(total) // BLOCK)
    blocks = 1 + torch.randperm(num_seqs * max_blocks, generator=generator).view(num_seqs, max_blocks)
    backend = TorchReferenceAttention(spec(window=window))
    cache = backend.allocate(1 + num_seqs * max_blocks)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)
    done = [0] * num_seqs
    for step in steps:
        seqs = [s for s in range(num_seqs) if step[s]]
        spans = [slice(done[s], done[s] + step[s]) for s in seqs]
        places = [torch.arange(span.start, span.stop) for span in spans]
        slots = [blocks[s][place // BLOCK] * BLOCK + place % BLOCK for s, place in zip(seqs, places, strict=True)]
        done = [d + n for d, n in zip(done, step, strict=True)]
        lens = [done[s] for s in seqs]
        backend.prepare(
            AttentionMetadata(
                query_start_loc=torch.tensor([0, *(step[s] for s in seqs)]).cumsum(0).int(),
                seq_lens=torch.tensor(lens).int(),
                block_table=blocks[seqs].int(),
                slot_mapping=torch.cat(slots),
            )
        )
        packed = [torch.cat([x[s][span] for s, span in zip(seqs, spans, strict=True)]) for x in (q, k, v)]
        out = backend.run(1, *packed)
        expected = [
            dense(q[s][span], k[s][: done[s]], v[s][: done[s]], window) for s, span in zip(seqs, spans, strict=True)
        ]
        torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 3, 5])
@pytest.mark.parametrize("workspace", [1, 500, 2**24])
def test_mixed_steps_equal_dense_attention(monkeypatch: pytest.MonkeyPatch, workspace: int, window: int | None) -> None:
    monkeypatch.setattr(torch_reference, "WORKSPACE_ELEMENTS", workspace)
    run_steps([[13, 4, 1], [1, 5, 1], [1, 0, 7], [6, 1, 1], [1, 1, 1]], window)


def test_negative_slots_are_not_stored() -> None:
    backend = TorchReferenceAttention(spec())
    cache = backend.allocate(3)
    one = torch.ones(3, GROUPS, DIM)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, 3]).int(),
        seq_lens=torch.tensor([3]).int(),
        block_table=torch.tensor([[1]]).int(),
        slot_mapping=torch.tensor([4, -1, 6]),
    )
    backend.prepare(metadata)
    backend.run(0, torch.ones(3, HEADS, DIM), one, one)
    assert cache.keys[0].flatten(0, 1)[:, 0, 0].tolist() == [0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0]
    assert not cache.keys[1].any()


def test_keeps_the_type_of_the_query() -> None:
    backend = TorchReferenceAttention(spec(torch.bfloat16))
    backend.allocate(2)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, 1]).int(),
        seq_lens=torch.tensor([1]).int(),
        block_table=torch.tensor([[1]]).int(),
        slot_mapping=torch.tensor([4]),
    )
    backend.prepare(metadata)
    v = torch.randn(1, GROUPS, DIM).bfloat16()
    out = backend.run(0, torch.randn(1, HEADS, DIM).bfloat16(), v, v)
    assert torch.equal(out, v.repeat_interleave(HEADS // GROUPS, dim=1))


def test_block_bytes_counts_keys_and_values_of_all_layers() -> None:
    backend = TorchReferenceAttention(spec())
    cache = backend.allocate(10)
    assert sum(tensor.nbytes for tensor in (*cache.keys, *cache.values)) == 10 * spec().block_bytes


def test_selection_by_name_and_its_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "cpu", ("engine.attention.nowhere", "Nothing"))
    assert select_backend("torch_reference", spec()) == (TorchReferenceAttention, [])
    backend, notes = select_backend("auto", spec())
    assert backend is TorchReferenceAttention
    assert len(notes) == 1
    assert "cpu cannot be used: No module named" in notes[0]
    with pytest.raises(SettingsError, match="cpu cannot be used"):
        select_backend("cpu", spec())
    with pytest.raises(SettingsError, match=r"flash: unknown.*cpu, torch_reference"):
        select_backend("flash", spec())
