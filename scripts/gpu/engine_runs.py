"""Requests through an `EngineCore`, as the server would send them."""

import random
import time
from collections.abc import Sequence
from typing import Any

from configs.sampling import SamplingParams
from configs.settings import EngineConfig
from engine.core import EngineCore
from engine.messages import AddRequest, TokenOutput
from engine.start import start_core

from . import dry
from .plan import Plan

Work = list[tuple[list[int], SamplingParams]]


def make_core(plan: Plan, model: str = "random", **settings: Any) -> EngineCore:
    defaults: dict[str, Any] = {"device": plan.device, "generation_config": "none"}
    if plan.is_dry:
        defaults |= {"dtype": "float32", "attention_backend": dry.BACKEND, "num_threads": 1}
        defaults |= {"kv_cache_tokens": 512, "max_model_len": 64, "max_num_seqs": 2}  # padding takes time, too
    return start_core(EngineConfig(model=model, **defaults | settings))


def random_prompt(source: random.Random, length: int, vocab_size: int) -> list[int]:
    return [source.randrange(vocab_size) for _ in range(length)]


def add(core: EngineCore, request_id: str, prompt: list[int], params: SamplingParams) -> None:
    """Raises RuntimeError when it is refused."""
    message = AddRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=params)
    if (refusal := core.add_request(message)) is not None:
        raise RuntimeError(f"request {request_id}: {refusal.error}")


def step(core: EngineCore) -> list[TokenOutput]:
    """Raises RuntimeError when a request fails."""
    outputs = core.step()
    for output in outputs:
        if output.finish_reason == "error":
            raise RuntimeError(f"request {output.request_id}: {output.error}")
    return outputs


def run_all(core: EngineCore, work: Sequence[tuple[list[int], SamplingParams]]) -> list[list[TokenOutput]]:
    """All requests at once, to their ends: the outputs of each."""
    for index, (prompt, params) in enumerate(work):
        add(core, str(index), prompt, params)
    outputs: list[list[TokenOutput]] = [[] for _ in work]
    while core.has_work:
        for output in step(core):
            outputs[int(output.request_id)].append(output)
    return outputs


def count_until(core: EngineCore, work: Work, seconds: float) -> tuple[int, float, int]:
    """All requests at once, to their ends or for so long: tokens that came out, seconds, requests that ended."""
    for index, (prompt, params) in enumerate(work):
        add(core, str(index), prompt, params)
    started, tokens, ended = time.perf_counter(), 0, 0
    while core.has_work and time.perf_counter() - started < seconds:
        for output in step(core):
            tokens += len(output.new_token_ids)
            ended += output.finish_reason is not None
    took = time.perf_counter() - started
    core.abort_requests([str(index) for index in range(len(work))])
    return tokens, took, ended
