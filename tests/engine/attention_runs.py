"""Steps of sequences through an attention backend, each compared with attention written out for one sequence at a time.

Nothing of the engine's own attention is used for what is expected.
"""

import torch
from torch import Tensor

from engine.attention.metadata import AttentionBackend, AttentionMetadata, AttentionSpec

GREATEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def make_spec(**changes: object) -> AttentionSpec:
    values = {
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "block_size": 16,
        "windows": (None, 5),
        "scale": 0.3,
    }
    return AttentionSpec(**(values | changes))


def dense(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float, softcap: float = 0.0) -> Tensor:
    """q [Q, H, d] are the last queries of k, v [K, G, d]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = (distance < 0) | (distance >= (window or len(k)))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What is left of x [..., d] in a cache of this type."""
    if dtype not in GREATEST:
        return x.to(dtype).float()
    scale = x.abs().amax(-1, keepdim=True) / GREATEST[dtype]
    small = x / scale
    return (small.round() if dtype == torch.int8 else small.to(dtype).float()) * scale


def run_steps(
    backend: AttentionBackend,
    spec: AttentionSpec,
    steps: list[list[int]],
    shared: int = 0,
    unwritten: float = torch.nan,
) -> float:
    """`steps[i][s]`: new tokens of sequence s in step i. Returns the greatest difference of all layers and steps.

    The last sequence begins with `shared` tokens of the first, whole blocks, and does not compute them again.
    """
    generator = torch.Generator().manual_seed(0)
    num_seqs = len(steps[0])
    done = [0] * (num_seqs - 1) + [shared]
    total = [done[s] + sum(step[s] for step in steps) for s in range(num_seqs)]
    layers = [
        [
            [torch.randn(n, heads, spec.head_dim, generator=generator).to(spec.dtype).float() for n in total]
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        ]
        for _ in spec.windows
    ]
    max_blocks = -(-max(total) // spec.block_size)
    blocks = 1 + torch.randperm(num_seqs * max_blocks, generator=generator).view(num_seqs, max_blocks)
    blocks[-1, : shared // spec.block_size] = blocks[0, : shared // spec.block_size]
    for _, *stored in layers:
        for x in stored:
            x[-1][:shared] = x[0][:shared]
    cache = backend.allocate(1 + num_seqs * max_blocks)
    for tensor in (*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales):
        tensor.copy_(torch.full(tensor.shape, 0.0 if tensor.dtype == torch.int8 else unwritten))
    worst = 0.0
    for step in steps:
        seqs = [s for s in range(num_seqs) if step[s]]
        spans = [slice(done[s], done[s] + step[s]) for s in seqs]
        done = [d + n for d, n in zip(done, step, strict=True)]
        backend.prepare(step_metadata(spec, blocks[seqs], spans))
        for layer, (q, k, v) in enumerate(layers):
            packed = [torch.cat([x[s][span] for s, span in zip(seqs, spans, strict=True)]) for x in (q, k, v)]
            out = backend.run(layer, *(x.to(spec.dtype) for x in packed))
            assert out.dtype == spec.dtype
            expected = [
                dense(
                    q[s][span],
                    *(as_stored(x[s][: done[s]], spec.cache_dtype) for x in (k, v)),
                    spec.windows[layer],
                    spec.scale,
                    spec.softcap,
                )
                for s, span in zip(seqs, spans, strict=True)
            ]
            difference = (out.float() - torch.cat(expected)).abs().max()
            worst = max(worst, float(difference.nan_to_num(nan=torch.inf)))
    return worst


def step_metadata(spec: AttentionSpec, blocks: Tensor, spans: list[slice]) -> AttentionMetadata:
    """Of a step in which sequence s, whose blocks are blocks[s], computes the positions spans[s]."""
    places = [torch.arange(span.start, span.stop) for span in spans]
    slots = [
        row[place // spec.block_size] * spec.block_size + place % spec.block_size
        for row, place in zip(blocks, places, strict=True)
    ]
    num_blocks = -(-max(span.stop for span in spans) // spec.block_size)
    return AttentionMetadata.from_host(
        query_start_loc=torch.tensor([0, *(len(place) for place in places)]).cumsum(0).int().numpy(),
        seq_lens=torch.tensor([span.stop for span in spans]).int().numpy(),
        block_table=blocks[:, :num_blocks].int().contiguous().numpy(),
        slot_mapping=torch.cat(slots).numpy(),
    )
