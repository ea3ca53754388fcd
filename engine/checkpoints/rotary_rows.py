"""The order in which the kernels want the rows of queries and keys: pairs that turn together half a head apart.

Of a head of d elements, of which r turn, files have one of two orders, and the kernels one of their own:

    half a head apart   0 … r/2-1 | r/2 … r-1 | r … d-1                         pairs (0, r/2), (1, r/2 + 1), …
    interleaved         0, 1, 2, 3, … r-1     | r … d-1                         pairs (0, 1), (2, 3), …
    kernels             firsts of the pairs, half of the rest | seconds of the pairs, other half of the rest

The rest is turned by an angle of 0, so kernels know nothing of a part that does not turn. Queries and keys change
their order alike, and their products stay as they are. Whole rows move, so quantised rows stay as they are.
"""

import re
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from engine.models.config import ModelConfig

from .checkpoint import StoredTensor
from .family import Family

Order = npt.NDArray[np.int64]

ROTATED = ("q", "k", "qkv", "q_norm", "k_norm")


def transposed(tensors: dict[str, StoredTensor], family: Family) -> dict[str, StoredTensor]:
    """`tensors` with the shapes of a network whose file has some as [columns, rows]."""
    modules = [re.escape(family.names[part][0]).replace("N", r"\d+") for part in family.transposed]
    stored = re.compile("|".join(modules) or "(?!)")
    return {
        name: replace(tensor, shape=tensor.shape[::-1], is_transposed=True)
        if len(tensor.shape) == 2 and stored.fullmatch(name.removesuffix(".weight"))
        else tensor
        for name, tensor in tensors.items()
    }


def in_kernels_order(
    tensors: dict[str, StoredTensor],
    config: ModelConfig,
    family: Family,
    *,
    is_interleaved: bool,
    by_head: bool = False,
) -> dict[str, StoredTensor]:
    """`tensors`, those of queries and keys with `row_order`.

    With `by_head`, fused tensors have q, k and v of the first head, then those of the second, and so on.
    """
    order = head_order(config.head_dim, config.rotary_dim or config.head_dim, is_interleaved=is_interleaved)
    if np.array_equal(order, np.arange(config.head_dim)) and not by_head:
        return tensors
    templates = [family.names[part][0] for part in ROTATED if part in family.names]
    names = {template.replace("N", str(layer)) for template in templates for layer in range(config.num_layers)}
    heads = config.num_heads + config.num_kv_heads
    return {
        name: replace(tensor, row_order=row_order(tensor, order, heads, config.num_heads * by_head))
        if name.rpartition(".")[0] in names
        else tensor
        for name, tensor in tensors.items()
    }


def head_order(head_dim: int, rotary_dim: int, *, is_interleaved: bool) -> Order:
    """Where the elements of a head, as kernels have them, lie in the file: [head_dim]"""
    turning, rest = np.arange(rotary_dim), np.arange(rotary_dim, head_dim)
    firsts, seconds = (turning[::2], turning[1::2]) if is_interleaved else np.split(turning, 2)
    return np.concatenate((firsts, rest[: len(rest) // 2], seconds, rest[len(rest) // 2 :]))


def row_order(tensor: StoredTensor, order: Order, num_heads: int, by_head: int = 0) -> Order | None:
    """`order` in each of the first `num_heads` heads, which are all but those of the values in fused tensors; the file
    has q, k and v of `by_head` heads one after the other.
    """
    head_dim = len(order)
    if not tensor.shape or tensor.shape[0] % head_dim:  # which the network will refuse
        return None
    rows = np.arange(tensor.shape[0]).reshape(-1, head_dim)
    if by_head and len(rows) == 3 * by_head:
        rows = rows.reshape(by_head, 3, head_dim).swapaxes(0, 1).reshape(-1, head_dim)
    rows[:num_heads] = rows[:num_heads, order]
    return rows.reshape(-1)
