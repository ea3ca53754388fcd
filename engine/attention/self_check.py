"""Whether a backend computes on this device what the plain torch operations compute.

For devices that the tests have never seen. Three steps over a cache whose blocks are shuffled and hold rubbish:

    sequences   0      1      2      3      no sequence, as a padded row of a CUDA graph
    prompts     50     200                  tokens
    mixed       20     1      90     1
    decode      1      1      1      1      -
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from .metadata import AttentionBackend, AttentionMetadata, AttentionSpec, KVCache
from .torch_reference import TorchReferenceAttention

STEPS = ((50, 200, 0, 0), (20, 1, 90, 1), (1, 1, 1, 1))
"""New tokens of each sequence."""
MOST_POSITIONS = 256
WINDOW, SOFTCAP = 40, 1.0
"""Windows and caps of a model are cut to these, or they would not show in so few tokens and in scores of about 1."""
RUBBISH = 100.0
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
"""Of any head of any row: the norm of the difference over the norm of what should be there. bfloat16 rounds by up to
4e-3, probabilities and results."""


def self_check(backend_class: type[AttentionBackend], spec: AttentionSpec) -> str | None:
    """What went wrong; None when all is well. Takes about a second, most of it for compiling kernels."""
    windows = dict.fromkeys(window and min(window, WINDOW) for window in spec.windows)
    small = replace(spec, windows=tuple(windows), softcap=min(spec.softcap, SOFTCAP))
    try:
        worst = max(_errors(backend_class, small))
    except Exception as error:  # of any kernel, compiler or library
        return f"{type(error).__name__}: {error}".splitlines()[0]
    tolerance = TOLERANCE[spec.dtype]
    return None if worst < tolerance else f"its results are off by {worst:.1e}, more than {tolerance:.0e}"


def _errors(backend_class: type[AttentionBackend], spec: AttentionSpec) -> Iterator[float]:
    """Greatest relative error of each layer and step; infinite where there are numbers that are none."""
    blocks_per_seq = -(-MOST_POSITIONS // spec.block_size)
    blocks = 1 + np.random.default_rng(0).permutation(len(STEPS[0]) * blocks_per_seq).reshape(-1, blocks_per_seq)
    backends = backend_class(spec), TorchReferenceAttention(spec)
    for backend in backends:
        _spoil(backend.allocate(blocks.size + 1))
    generator = torch.Generator(spec.device).manual_seed(0)
    computed = np.zeros(len(blocks), np.int64)
    for step in STEPS:
        new = np.array(step)
        metadata = _metadata(spec, blocks, computed, new)
        computed += new
        for backend in backends:
            backend.prepare(metadata)
        for layer in range(spec.num_layers):
            vectors = [
                torch.randn(len(metadata.slot_mapping), heads, spec.head_dim, generator=generator, device=spec.device)
                for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
            ]
            q, k, v = (x.to(spec.dtype) for x in vectors)
            out, expected = (backend.run(layer, q, k, v)[: new.sum()].float() for backend in backends)
            error = (out - expected).norm(dim=-1) / expected.norm(dim=-1)
            yield float(error.nan_to_num(nan=torch.inf).max())


def _metadata(spec: AttentionSpec, blocks: np.ndarray, computed: np.ndarray, new: np.ndarray) -> AttentionMetadata:
    """Of a step with `new` tokens of each sequence behind those that are `computed`."""
    seqs = np.flatnonzero(new)
    token_seqs = np.repeat(seqs, new[seqs])
    positions = np.concatenate([np.arange(computed[seq], computed[seq] + new[seq]) for seq in seqs])
    slots = blocks[token_seqs, positions // spec.block_size] * spec.block_size + positions % spec.block_size
    query_lens, seq_lens, block_table = new[seqs], (computed + new)[seqs], blocks[seqs]
    if new.max() == 1:
        query_lens, seq_lens, slots = np.append(query_lens, 1), np.append(seq_lens, 0), np.append(slots, -1)
        block_table = np.concatenate([block_table, np.zeros_like(block_table[:1])])
    return AttentionMetadata.from_host(
        query_start_loc=np.concatenate([[0], query_lens.cumsum()]).astype(np.int32),
        seq_lens=seq_lens.astype(np.int32),
        block_table=block_table.astype(np.int32),
        slot_mapping=slots.astype(np.int64),
        device=spec.device,
    )


def _spoil(cache: KVCache) -> None:
    """Finite rubbish, since some backends multiply it by 0."""
    for tensor in (*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales):
        tensor.copy_(torch.full(tensor.shape, RUBBISH, device=tensor.device))
