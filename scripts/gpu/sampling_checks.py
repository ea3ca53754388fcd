"""The sampling kernels on this device against plain torch on the CPU: from equal logits the same tokens."""

import numpy as np
import torch

from engine.kernels.gpu.sampling import choose_tokens
from engine.kernels.ops import TokenChoice
from engine.kernels.torch_sampling import choose_tokens as plain_choose_tokens

from .bench import Bench

KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k": {"top_k": 40},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "all filters": {"temperature": 0.7, "top_k": 200, "top_p": 0.95, "min_p": 0.01},
    "top_p of flat logits": {"temperature": 20.0, "top_p": 0.97},
}
ALLOWED = 0.005
"""Share of the draws whose uniform number may lie within rounding of a border between two tokens."""


def token_choice(
    rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> TokenChoice:
    return TokenChoice(
        temperature=np.full(rows, temperature, np.float32),
        top_k=np.full(rows, top_k, np.int64),
        top_p=np.full(rows, top_p),
        min_p=np.full(rows, min_p, np.float32),
        u=np.random.default_rng(0).random(rows),
    )


@torch.inference_mode()
def run(bench: Bench) -> None:
    rows, vocab = (3, 700) if bench.plan.is_dry else (256, 151936)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 3
    for name, options in KINDS.items():
        if not bench.has(2, name):
            continue
        choice = token_choice(rows, **options)
        try:
            own, highest = choose_tokens(logits.to(bench.plan.device), choice)
            expected, expected_highest = plain_choose_tokens(logits.clone(), choice)
            different = (own.cpu() != expected).double().mean().item()
            bench.check(f"{name}: share of other tokens", different, 0.0 if name == "greedy" else ALLOWED)
            bench.check(f"{name}: highest logits", (highest.cpu() - expected_highest).abs().max().item(), 0.0)
        except Exception as error:
            bench.fail(name, error)
