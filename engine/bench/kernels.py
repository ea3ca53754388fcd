"""Each kernel within whole steps, so that all weights are streamed as they are when requests are served.

Decode steps of several numbers of rows, one prefill step, and for each kernel of a step: its time, the bytes and
operations that it cannot do without, and how near it comes to the limit that these set. The fastest try counts, as it
does for the limits: whatever else runs on the machine only adds time.
"""

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.errors import UsageError
from configs.settings import EngineConfig
from engine.bundled import locate_model
from engine.checkpoints import open_checkpoint
from engine.device import free_memory, set_threads
from engine.kernels.cpu.build import KernelsUnavailable
from engine.kernels.cpu.ops import CPUOps
from engine.kernels.ops import TokenChoice, each_layer
from engine.loading import LoadedModel, load_model
from engine.machine import usable_cores
from engine.models.config import ModelConfig

from .ceilings import Ceilings, measure_ceilings
from .steps import Steps

KERNELS = ("attention_input", "attention", "attention_output", "logits", "sampling")
TOP_P = 0.9


class Stopwatch:
    """Stands before an object and adds up the time of the calls that are named. Layers are run one by one."""

    def __init__(self, target: Any, names: dict[str, str], seconds: dict[str, float]) -> None:
        self._target, self._names, self._seconds = target, names, seconds

    def run_layers(self, *args: Any) -> Tensor:
        return each_layer(self, *args)  # type: ignore[arg-type]  # has the methods by __getattr__

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        kernel = self._names.get(name)
        if kernel is None:
            return method

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = method(*args, **kwargs)
            self._seconds[kernel] += time.perf_counter() - start
            return result

        return timed


@dataclass(frozen=True)
class Work:
    """What a kernel cannot do without in one step: bytes of weights, keys, values or logits, and operations."""

    num_bytes: float
    operations: float
    kind: str
    """Of the products."""


@torch.inference_mode()
def measure(config: EngineConfig, *, rows: list[int], context: int, repeats: int) -> dict[str, Any]:
    """Raises `UsageError` where there are no C++ kernels, or `rows` sequences do not fit the memory."""
    num_threads = config.num_threads or usable_cores()
    set_threads(num_threads)
    try:
        ceilings = measure_ceilings(num_threads)
    except KernelsUnavailable as error:
        raise UsageError(f"there are no C++ kernels to measure: {error}") from error
    model = load_model(config, open_checkpoint(locate_model(config.model)))
    if model.backend.name != "cpu" or not isinstance(model.decoder.ops, CPUOps):
        raise UsageError(f"this model does not run on the C++ kernels: {'; '.join(model.notes) or config.device}")
    _fill_cache(model, max(rows), context)
    shapes = [(f"decode, {n} x {context} tokens", n, 1) for n in rows] + [(f"prefill, {context} tokens", 1, context)]
    steps = [
        {"what": what, **_measure_step(model, ceilings, num_seqs, context, query_len, repeats)}
        for what, num_seqs, query_len in shapes
    ]
    return {
        "ceilings": {
            "gigabytes_read_per_second": round(ceilings.bytes_read / 1e9, 2),
            **{f"gflops_{kind}": round(rate / 1e9, 1) for kind, rate in ceilings.operations.items()},
        },
        "steps": steps,
        "dtype": str(model.spec.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "num_threads": num_threads,
        "context": context,
        "repeats": repeats,
    }


def _fill_cache(model: LoadedModel, num_seqs: int, context: int) -> None:
    """Memory that was never written is one page of zeros, which a cache would hold."""
    block_size = model.spec.block_size
    num_blocks = 1 + num_seqs * -(-context // block_size)
    num_bytes = num_blocks * model.spec.block_bytes
    if num_bytes > free_memory(model.spec.device):
        raise UsageError(
            f"{num_seqs} sequences of {context} tokens take {num_bytes / 2**30:.1f} GiB; take fewer --rows"
        )
    cache = model.backend.allocate(num_blocks)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(1)


def _measure_step(
    model: LoadedModel, ceilings: Ceilings, num_seqs: int, context: int, query_len: int, repeats: int
) -> dict[str, Any]:
    steps = Steps(model, num_seqs=num_seqs, seq_len=context, query_len=query_len)
    vocab_size = model.decoder.config.vocab_size
    token_ids = torch.randint(vocab_size, (num_seqs * query_len,), generator=torch.Generator().manual_seed(0))
    _run(steps, token_ids)
    runs = [_run(steps, token_ids) for _ in range(repeats)]
    total = min(run["step"] for run in runs)
    kernels = []
    for name, work in work_of_step(model, num_seqs, context, query_len).items():
        seconds = min(run[name] for run in runs)
        least, limit = ceilings.seconds(work.num_bytes, work.operations, work.kind)
        kernels.append(
            {
                "kernel": name,
                "rows": num_seqs if name in ("logits", "sampling") else num_seqs * query_len,
                "ms": round(seconds * 1e3, 3),
                "gigabytes_per_second": round(work.num_bytes / seconds / 1e9, 2),
                "gflops": round(work.operations / seconds / 1e9, 1) if work.operations else None,
                "limit": limit,
                "percent_of_limit": round(100 * least / seconds, 1),
                "percent_of_step": round(100 * seconds / total, 1),
            }
        )
    other = min(run["other"] for run in runs)
    return {
        "rows": num_seqs * query_len,
        "ms": round(total * 1e3, 3),
        "other_ms": round(other * 1e3, 3),
        "kernels": kernels,
    }


def _run(steps: Steps, token_ids: Tensor) -> dict[str, float]:
    """Seconds of one step by kernel, with `other` for all the rest of it; and of a `step` as requests meet it, which
    runs all layers in one call."""
    seconds: dict[str, float] = defaultdict(float)
    decoder: Any = steps.decoder  # a Stopwatch is what it stands before only at run time
    backend, ops = steps.backend, decoder.ops
    names = {"attention_input": "attention_input", "attention_output": "attention_output", "logits": "logits"}
    decoder.ops = Stopwatch(ops, {**names, "choose_tokens": "sampling"}, seconds)
    stopwatch: Any = Stopwatch(backend, {"run": "attention"}, seconds)
    steps.backend = stopwatch
    try:
        start = time.perf_counter()
        _step(steps, token_ids)
        seconds["other"] = time.perf_counter() - start - sum(seconds.values())
    finally:
        decoder.ops, steps.backend = ops, backend
    start = time.perf_counter()
    _step(steps, token_ids)
    seconds["step"] = time.perf_counter() - start
    return seconds


def _step(steps: Steps, token_ids: Tensor) -> None:
    logits = steps.decoder.compute_logits(steps.forward(token_ids, steps.last_rows))
    steps.decoder.ops.choose_tokens(logits, _choice(len(logits)))


def _choice(rows: int) -> TokenChoice:
    """Sampling as most requests ask for it: a temperature and a top_p."""
    return TokenChoice(
        temperature=np.ones(rows, np.float32),
        top_k=np.zeros(rows, np.int64),
        top_p=np.full(rows, TOP_P),
        min_p=np.zeros(rows, np.float32),
        u=np.linspace(0, 0.99, rows),
    )


def work_of_step(model: LoadedModel, num_seqs: int, context: int, query_len: int) -> dict[str, Work]:
    """By kernel; a sliding window shortens the keys that a query sees."""
    config, layers, head = model.decoder.config, model.decoder.weights.layers, model.decoder.weights.head
    dtype, rows = str(model.spec.dtype).removeprefix("torch."), num_seqs * query_len
    keys = [_keys(config, layer, context, query_len) for layer in range(config.num_layers)]
    stored = 2 * config.num_kv_heads * model.spec.vector_bytes  # bytes per token and layer
    return {
        "attention_input": _products([layer.qkv for layer in layers], rows, dtype),
        "attention": Work(
            num_seqs * stored * sum(each[0] for each in keys),
            num_seqs * 4 * config.num_heads * config.head_dim * sum(each[1] for each in keys),
            dtype,
        ),
        "attention_output": _products(
            [linear for layer in layers for linear in (layer.output, layer.gate_up, layer.down)], rows, dtype
        ),
        "logits": _products([head], num_seqs, dtype),
        "sampling": Work(num_seqs * config.vocab_size * 4, 0, "float32"),
    }


def _keys(config: ModelConfig, layer: int, context: int, query_len: int) -> tuple[int, int]:
    """Of one sequence in one layer: keys that are read at least once, and pairs of a query and a key."""
    window = config.window(layer) or context
    pairs = sum(min(window, position + 1) for position in range(context - query_len, context))
    return min(context, window + query_len - 1), pairs


def _products(linears: list[Any], rows: int, dtype: str) -> Work:
    tensors = [value for linear in linears for value in linear if isinstance(value, Tensor)]
    operations = sum(2 * rows * linear.rows * linear.columns for linear in linears)
    is_quantised = any(linear.bits for linear in linears)
    return Work(sum(tensor.nbytes for tensor in tensors), operations, "int8" if is_quantised else dtype)
