"""Launches of linear layers with weights of few bits, for ahead_of_time.py."""

from collections.abc import Iterator

import torch

from engine.kernels.gpu.float8 import round_tokens
from engine.kernels.gpu.quantised import PackedWeight, few_rows_linear, many_rows_linear
from tests.engine.ahead_of_time import Launch

ROWS, COLUMNS = 4096, 4096


def launches(capability: tuple[int, int]) -> Iterator[Launch]:
    product = {8: "HMMA", 9: "HGMMA", 10: "UTCMMA"}[capability[0]]
    cases = (
        (4, True, torch.bfloat16, 16, False),
        (4, False, torch.bfloat16, 64, False),
        (4, False, torch.float16, 32, True),
        (8, True, torch.bfloat16, 64, True),
        (8, False, torch.float16, 16, False),
        (8, True, torch.float32, 16, True),
    )
    for bits, symmetric, dtype, tokens, slow in cases:
        weight = PackedWeight(
            torch.empty(ROWS, COLUMNS * bits // 8, dtype=torch.uint8, device="meta"),
            torch.empty(ROWS, COLUMNS // 32, dtype=torch.float16 if symmetric else torch.int32, device="meta"),
            bits,
        )
        x = torch.empty(tokens, COLUMNS, dtype=dtype, device="meta")
        bias = torch.empty(ROWS, dtype=dtype, device="meta")
        spills = 8 if (capability[0], tokens) == (10, 32) else 0  # one register, outside of the loop
        name = f"{bits} bits symmetric={symmetric} {dtype} {tokens} tokens"
        expected = {"_multiply": [product] if dtype != torch.float32 else [], "_add_splits": []}
        args = (x, weight, bias, dtype)
        yield Launch(name, lambda args=args: few_rows_linear(*args), expected, max_stack=spills, slow=slow)
        yield Launch(name, lambda args=args: many_rows_linear(*args), {"_dequantise": []}, slow=slow)
        if tokens == 16:
            head = (x, weight, None, torch.float32)
            yield Launch(f"{name} head", lambda args=head: few_rows_linear(*args), expected, slow=True)
    if capability >= (8, 9):
        for columns, dtype in ((28672, torch.bfloat16), (576, torch.float16)):
            x = torch.empty(7, columns, dtype=dtype, device="meta")
            yield Launch(f"float8 {columns} {dtype}", lambda x=x: round_tokens(x), {"_round": []})
