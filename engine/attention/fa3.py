"""FlashAttention 3 for sequences with several queries; those with one stay with the Triton kernels.

Its operator would serve both, but cuts a single query's keys into parts only as the whole batch's lengths suggest: then
the bits of a row depend on its mates. Uncut (`num_splits` 1) they do not, and one query keeps few processors busy.

The operator is `torch.ops.flash_attn_3.fwd`, which the package flash_attn_3 registers. It reads the paged cache as it
is; causality counts from each sequence's last key, and a window of W positions is (W - 1, 0).
"""

from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from .metadata import AttentionMetadata, AttentionSpec
from .triton_paged import TritonAttention

ARGUMENTS = {
    *("q", "k", "v", "out", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "page_table", "softmax_scale"),
    *("is_causal", "window_size_left", "window_size_right", "num_splits"),
}
"""What is passed, by name; all others have to have defaults."""


class FA3Attention(TritonAttention):
    name: ClassVar[str] = "fa3"

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        reasons = super().unsupported(spec)
        if spec.capability != (9, 0):
            reasons.append(f"it is made for compute capability 9.0, not {'.'.join(map(str, spec.capability))}")
        if spec.dtype not in (torch.bfloat16, torch.float16):
            reasons.append(f"it does not compute in {spec.dtype}")
        if spec.has_scales:
            reasons.append(f"it has no cache of {spec.cache_dtype}")
        if spec.softcap:
            reasons.append("it has no soft-cap")
        if spec.head_dim % 8:
            reasons.append(f"head_dim {spec.head_dim} is no multiple of 8")
        return reasons or operator_problems()

    def prepare(self, metadata: AttentionMetadata) -> None:
        super().prepare(metadata)
        if self.has_several:  # int32 [num_seqs]: keys that FlashAttention has to read
            self.seen = metadata.seq_lens.masked_fill(metadata.query_start_loc.diff() == 1, 0)

    def _attend_blocks(self, layer: int, q: Tensor, out: Tensor) -> None:
        window = self.spec.windows[layer]
        torch.ops.flash_attn_3.fwd(
            q=q,
            k=self.cache.keys[layer],
            v=self.cache.values[layer],
            out=out,
            cu_seqlens_q=self.metadata.query_start_loc,
            seqused_k=self.seen,
            max_seqlen_q=self.metadata.max_query_len,
            page_table=self.metadata.block_table,
            softmax_scale=self.spec.scale,
            is_causal=True,
            window_size_left=-1 if window is None else window - 1,
            window_size_right=-1 if window is None else 0,
            num_splits=1,
        )


def operator_problems() -> list[str]:
    """Why the operator cannot be called; importing its package registers it."""
    if not hasattr(torch.ops.flash_attn_3, "fwd"):
        try:
            import_module("flash_attn_3._C")
        except (ImportError, OSError) as error:
            return [str(error)]
    if not hasattr(torch.ops.flash_attn_3, "fwd"):
        return ["flash_attn_3 registers no operator `fwd`"]
    return schema_problems(torch.ops.flash_attn_3.fwd.default._schema)


def schema_problems(schema: Any) -> list[str]:
    """What keeps an operator of this torch.FunctionSchema from being called."""
    missing = ARGUMENTS - {argument.name for argument in schema.arguments}
    needed = {each.name for each in schema.arguments if not each.has_default_value()} - ARGUMENTS
    problems = (("lacks", missing), ("asks for", needed))
    return [f"its operator {verb} the arguments {', '.join(sorted(names))}" for verb, names in problems if names]
