"""Whole models of random weights through the engine: scheduler, graphs and sampling included.

Of each: prompts to their first tokens, against the matrix rate; then decode steps of the same requests, against the
bandwidth: all weights and all keys and values are read once in a step.
"""

import gc
import random
import time
from typing import Any

import torch

from configs.sampling import SamplingParams
from engine.core import EngineCore
from engine.models.config import ModelConfig

from .bench import Bench
from .engine_runs import add, make_core, random_prompt, step
from .random_checkpoint import served
from .shapes import DRY_LLAMA, LLAMA_1B, LLAMA_8B, QWEN3_600M, kv_bytes, prefill_operations, weight_bytes

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama-3.1-8B": (LLAMA_8B, {}),
    "Llama-3.2-1B": (LLAMA_1B, {}),
    "Qwen3-0.6B": (QWEN3_600M, {}),
    "Llama-3.1-8B fp8": (LLAMA_8B, {"quantization": "fp8"}),
}
DRY_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {"tiny": (DRY_LLAMA, {})}
BATCHES = ((1, 2048), (16, 2048), (64, 2048), (256, 512))
"""Requests, and the tokens of each prompt."""
STEPS_BEFORE, STEPS = 8, 48
LONGEST_TIMING = 1.5  # seconds


def run(bench: Bench) -> None:
    models, batches = (DRY_MODELS, ((1, 3), (2, 2))) if bench.plan.is_dry else (MODELS, BATCHES)
    for name, (raw, settings) in models.items():
        if bench.has(0.5 if bench.plan.is_dry else 12, name):
            _measure_model(bench, name, raw, settings, batches)
            gc.collect()  # the memory is needed for the next
            torch.cuda.empty_cache()


def _measure_model(
    bench: Bench, name: str, raw: dict[str, Any], settings: dict[str, Any], batches: tuple[tuple[int, int], ...]
) -> None:
    with served(raw) as checkpoint:
        core = make_core(bench.plan, **_settings(bench, batches), **settings)
    bench.measure(f"{name} ready", **core.ready.timings, backend=core.ready.attention_backend, notes=core.ready.notes)
    for batch, context in batches:
        if bench.has(0.1 if bench.plan.is_dry else 3, f"{name} x {batch}"):
            _measure(bench, core, checkpoint.config, name, batch, context)


def _settings(bench: Bench, batches: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """A cache that holds the largest batch, and steps of thousands of tokens."""
    if bench.plan.is_dry:
        return {"enable_prefix_caching": False}
    room = max(batch * (context + 256) for batch, context in batches)
    return {
        "kv_cache_tokens": room,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
        "max_model_len": 4096,
        "enable_prefix_caching": False,
    }


def _measure(bench: Bench, core: EngineCore, config: ModelConfig, name: str, batch: int, context: int) -> None:
    source = random.Random(batch)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=200)
    ids = [f"{batch}-{index}" for index in range(batch)]
    for request_id in ids:
        add(core, request_id, random_prompt(source, context, config.vocab_size), params)
    prefill_seconds = _until_all_began(core, batch)
    operations = prefill_operations(config, core.ready.num_parameters, [context] * batch)
    bench.measure(
        f"{name} prefill {batch} x {context}",
        tokens_per_second=batch * context / prefill_seconds,
        operations_per_second=operations / prefill_seconds,
        of_matrix_rate=bench.of_ceiling("matrix_rate", operations / prefill_seconds),
    )
    before, most = (1, 4) if bench.plan.is_dry else (STEPS_BEFORE, STEPS)
    for _ in range(before):
        step(core)
    seconds, tokens, steps = _time_steps(core, most)
    element = 4 if core.ready.dtype == "float32" else 2
    in_layers = 1 if core.ready.quantization.startswith("fp8") else element
    mean_context = context + before + steps / 2
    num_bytes = weight_bytes(config, core.ready.num_parameters, in_layers, element)
    num_bytes += batch * mean_context * kv_bytes(config, element)
    rate = num_bytes * (tokens / batch) / seconds
    bench.measure(
        f"{name} decode {batch} x {context}",
        tokens_per_second=tokens / seconds,
        milliseconds_per_step=1e3 * seconds * batch / tokens,
        of_bandwidth=bench.of_ceiling("bandwidth", rate),
    )
    core.abort_requests(ids)
    while core.has_work:
        core.step()


def _until_all_began(core: EngineCore, count: int) -> float:
    """Seconds until each request has its first token."""
    began: set[str] = set()
    start = time.perf_counter()
    while len(began) < count:
        began |= {output.request_id for output in step(core) if output.new_token_ids}
    return time.perf_counter() - start


def _time_steps(core: EngineCore, most: int) -> tuple[float, int, int]:
    """Seconds, tokens that came out, steps."""
    start, tokens, steps = time.perf_counter(), 0, 0
    while steps < most and (steps < 4 or time.perf_counter() - start < LONGEST_TIMING):
        tokens += sum(len(output.new_token_ids) for output in step(core))
        steps += 1
    return time.perf_counter() - start, tokens, steps
