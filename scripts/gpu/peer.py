"""transformers' own continuous batching on the same shape and machine, and the engine on the same requests.

It runs with torch's attention, which needs no package beside torch; with flash-attn it would be faster.
"""

import gc
import time
import warnings
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.models.qwen3 import Qwen3Config

from .bench import Bench
from .engine_runs import Work, count_until, make_core
from .random_checkpoint import served
from .shapes import DRY_QWEN3, QWEN3_600M
from .workload import SETTINGS, VOCABULARY, nano_vllm_work

REQUESTS, TOKENS = 64, (100, 512)
"""A quarter of the workload, in shorter requests: the peer has to come to an end."""


def run(bench: Bench) -> None:
    is_dry = bench.plan.is_dry
    raw = DRY_QWEN3 if is_dry else QWEN3_600M
    count, tokens, vocab = (2, (2, 4), 90) if is_dry else (REQUESTS, TOKENS, VOCABULARY)
    work = nano_vllm_work(count, tokens, vocab)
    own = _own(bench, raw, work)
    bench.measure("octavo", output_tokens_per_second=own[0] / own[1], seconds=own[1], ended=own[2])
    gc.collect()
    torch.cuda.empty_cache()
    theirs = _transformers(bench, raw, work)
    rate = theirs[0] / theirs[1]
    bench.measure("transformers", output_tokens_per_second=rate, seconds=theirs[1], ended=theirs[2])
    bench.measure("octavo / transformers", ratio=own[0] / own[1] / rate)


def _own(bench: Bench, raw: dict[str, Any], work: Work) -> tuple[int, float, int]:
    """See `count_until`."""
    with served(raw):
        core = make_core(bench.plan, **({} if bench.plan.is_dry else SETTINGS))
    if not bench.plan.is_dry:
        count_until(core, nano_vllm_work(REQUESTS, (30, 60), VOCABULARY), bench.left / 4)
    return count_until(core, work, bench.left / 4)


def _transformers(bench: Bench, raw: dict[str, Any], work: Work) -> tuple[int, float, int]:
    """As `count_until`."""
    config = Qwen3Config(**{key: value for key, value in raw.items() if key not in ("architectures", "rope_scaling")})
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_default_device(bench.plan.device)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32 if bench.plan.is_dry else torch.bfloat16, attn_implementation="paged|sdpa"
    )
    torch.set_default_device(None)
    most = max(params.max_tokens or 0 for _, params in work)
    generation = GenerationConfig(do_sample=True, temperature=0.6, top_k=0, eos_token_id=-1, max_new_tokens=most)
    # Left alone, it takes nearly all memory, and masks of that size are slow.
    blocks, tokens = (8, 64) if bench.plan.is_dry else (320, 2048)
    sizes = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=tokens)
    manager = model.init_continuous_batching(generation, sizes)
    try:
        manager.warmup()
        manager.start()
        _serve(manager, work[:2], bench.left / 3)
        return _serve(manager, work, bench.left - 3)
    finally:
        manager.stop(block=True, timeout=2, hard_stop=True)


def _serve(manager: Any, work: Work, seconds: float) -> tuple[int, float, int]:
    """Streamed, so that requests count which the time does not let end."""
    started = time.perf_counter()
    for prompt, params in work:
        manager.add_request(prompt, max_new_tokens=params.max_tokens, streaming=True, eos_token_id=-1)
    counts: dict[str, int] = {}
    ended: set[str] = set()
    while len(ended) < len(work) and time.perf_counter() - started < seconds:
        result = manager.get_result(timeout=0.5)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("transformers' generation thread ended")
            continue
        if result.error:
            raise RuntimeError(f"transformers: {result.error}")
        counts[result.request_id] = len(result.generated_tokens)
        if result.is_finished():
            ended.add(result.request_id)
    return sum(counts.values()), time.perf_counter() - started, len(ended)
