"""Launches of paged attention, for `ahead_of_time`: shapes of real models over the types, windows and block sizes.

`families` are those of GPUs on which a row is always compiled, not only where everything is.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from engine.attention.metadata import AttentionMetadata, AttentionSpec
from engine.attention.triton_paged import TritonAttention
from tests.engine.ahead_of_time import Launch

F32, F16, BF16, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
META = torch.device("meta")


class MetaAttention(TritonAttention):
    num_processors = 132


def launches(capability: tuple[int, int]) -> Iterator[Launch]:
    products = {9: "HGMMA", 10: "UTCMMA"}.get(capability[0], "HMMA")
    for heads, kv_heads, head_dim, dtype, cache_dtype, block_size, window, softcap, families in (
        (32, 8, 128, BF16, BF16, 64, None, 0.0, (8, 9, 10)),
        (9, 3, 64, F16, F16, 16, None, 0.0, (9,)),
        (16, 8, 256, BF16, BF16, 64, 4096, 50.0, (9,)),
        (32, 32, 96, BF16, INT8, 16, 2047, 0.0, (8,)),
        (32, 8, 128, BF16, E4M3, 64, None, 0.0, (9,)),
        (64, 8, 64, F16, E5M2, 32, 128, 0.0, (10,)),
        (32, 8, 128, F32, F32, 64, None, 0.0, (9,)),
        (8, 4, 256, F32, INT8, 16, 512, 30.0, (8,)),
        (71, 1, 64, BF16, BF16, 64, None, 0.0, ()),
        (32, 32, 80, F16, F16, 256, None, 0.0, ()),
        (4, 4, 32, BF16, BF16, 16, 40, 0.0, ()),
        (9, 3, 64, F32, F32, 16, None, 0.0, ()),
        (9, 3, 64, BF16, INT8, 64, None, 0.0, ()),
        (32, 8, 128, F16, E5M2, 16, 4096, 50.0, ()),
        (32, 8, 128, BF16, INT8, 16, None, 0.0, ()),
        (16, 8, 256, F16, INT8, 16, None, 0.0, ()),
        (16, 2, 256, BF16, E4M3, 64, None, 0.0, ()),
    ):
        if cache_dtype == E4M3 and capability < (8, 9):
            continue  # the type came with that capability
        spec = AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=META,
            block_size=block_size,
            windows=(window,),
            scale=head_dim**-0.5,
            softcap=softcap,
            kv_cache_dtype=cache_dtype,
            capability=capability,
        )
        name = f"{heads}/{kv_heads}/{head_dim} {dtype} -> {cache_dtype} blocks {block_size} window {window} {softcap}"
        expected = {"store_kv": (), "attend_blocks": (), "attend_splits": (), "add_splits": ()}
        if dtype != F32:
            expected["attend_blocks"] = (products,)
            expected["attend_splits"] = ("HMMA" if heads // kv_heads < 64 else products,)
        yield Launch(
            name.replace("torch.", ""),
            partial(_steps, spec),
            expected,
            # Of float32, and of 8 bits: a few registers are spilled outside of the loops.
            max_stack=64 if dtype == F32 or cache_dtype != dtype else 0,
            slow=capability[0] not in families,
            variants=1,
        )


def _steps(spec: AttentionSpec) -> None:
    backend = MetaAttention(spec)
    backend.allocate(4)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    for num_seqs, num_tokens, max_blocks in ((2, 9, 3), (1, 1, 1), (16, 16, 16), (17, 33, 512)):
        query_start_loc = np.linspace(0, num_tokens, num_seqs + 1).astype(np.int32)
        backend.prepare(
            AttentionMetadata(
                *(torch.empty(size, dtype=torch.int32, device=META) for size in (num_seqs + 1, num_seqs)),
                torch.empty(num_seqs, max_blocks, dtype=torch.int32, device=META),
                torch.empty(num_tokens, dtype=torch.int64, device=META),
                query_start_loc,
                np.full(num_seqs, num_tokens, np.int32),
            )
        )
        packed = torch.empty(num_tokens, sum(heads), spec.head_dim, dtype=spec.dtype, device=META)
        backend.run(0, *packed.split(heads, dim=1))
