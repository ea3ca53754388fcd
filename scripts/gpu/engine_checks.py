"""The engine with graphs and with overlapped steps, against the engine that does one thing after the other.

A small random model in float32, where the order of sums changes nothing that a token could depend on; requests of many
lengths that begin and end at different times, so that a graph is replayed with changed batches, lengths and blocks.
"""

import random
from typing import Any

from configs.sampling import SamplingParams

from .bench import Bench
from .engine_runs import Work, make_core, random_prompt, run_all
from .random_checkpoint import served
from .shapes import QWEN3_600M

MODEL = QWEN3_600M | {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
DRY_MODEL = MODEL | {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
DEVIATION = 0.1

PLAIN = {"cuda_graphs": False, "async_scheduling": False}
VARIANTS = {
    "graphs": {"cuda_graphs": True, "async_scheduling": False},
    "overlap": {"cuda_graphs": False, "async_scheduling": True},
    "graphs and overlap": {"cuda_graphs": True, "async_scheduling": True},
}


def run(bench: Bench) -> None:
    work = mixed_work(bench.plan.is_dry)
    expected = _tokens(bench, work, PLAIN)
    for name, settings in VARIANTS.items():
        if not bench.has(3, name):
            continue
        try:
            tokens = _tokens(bench, work, settings)
        except Exception as error:
            bench.fail(name, error)
            continue
        different = sum(a != b for a, b in zip(tokens, expected, strict=True))
        bench.check(
            f"{name}: requests with other tokens", different, 0, requests=len(work), tokens=sum(map(len, tokens))
        )


def mixed_work(is_dry: bool) -> Work:
    """Greedy and seeded, with filters, penalties, stop ids and log-probabilities."""
    source = random.Random(0)
    count, prompt, output, vocab = (3, (1, 4), (2, 4), 96) if is_dry else (40, (5, 400), (10, 90), 1000)
    styles: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 2},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 1.0, "min_p": 0.05, "seed": 3, "logprobs": 2},
        {"temperature": 0.0, "stop_token_ids": tuple(range(0, vocab, 9))},
    ]
    return [
        (
            random_prompt(source, source.randint(*prompt), vocab),
            SamplingParams(max_tokens=source.randint(*output), ignore_eos=True, **styles[index % len(styles)]),
        )
        for index in range(count)
    ]


def _tokens(bench: Bench, work: Work, settings: dict[str, Any]) -> list[list[int]]:
    """Of each request. Fewer rows than requests, so that some wait."""
    is_dry = bench.plan.is_dry
    sizes = {"max_num_seqs": 24, "kv_cache_tokens": 2**14, "max_num_batched_tokens": 600, "max_model_len": 512}
    with served(DRY_MODEL if is_dry else MODEL, DEVIATION):
        core = make_core(bench.plan, dtype="float32", **({} if is_dry else sizes), **settings)
    outputs = run_all(core, work)
    return [[token for output in each for token in output.new_token_ids] for each in outputs]
