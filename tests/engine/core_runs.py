"""Runs of an in-process core over the tiny checkpoint."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from configs.sampling import SamplingParams
from configs.settings import EngineConfig
from engine.core import EngineCore
from engine.messages import AddRequest, TokenOutput
from engine.start import start_core
from tests.engine.tiny_models import VOCAB_SIZE


def make_core(folder: Path, **settings: object) -> EngineCore:
    """float32, the reference backend, and a cache in which nothing has to be preempted."""
    defaults: dict[str, object] = {
        "dtype": "float32",
        "device": "cpu",
        "attention_backend": "torch_reference",
        "kv_cache_tokens": 16384,
        "num_threads": 1,
    }
    return start_core(EngineConfig(model=str(folder), **defaults | settings))


def random_prompts(count: int, *, lengths: Sequence[int] = (5, 90), seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, rng.integers(lengths[0], lengths[1] + 1)).tolist() for _ in range(count)]


def add(core: EngineCore, request_id: str, prompt: list[int], params: SamplingParams, **fields: object) -> None:
    message = AddRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=params, **fields)
    assert core.add_request(message) is None


def finish(core: EngineCore, earlier: Sequence[TokenOutput] = ()) -> dict[str, TokenOutput]:
    """Step until nothing is left; the outputs of each request, `earlier` ones included, merged."""
    outputs = list(earlier)
    while core.has_work:
        outputs += core.step()
        core.scheduler.check_integrity()
    assert core.scheduler.num_used_blocks == 0
    merged: dict[str, list[TokenOutput]] = {}
    for output in outputs:
        merged.setdefault(output.request_id, []).append(output)
    for parts in merged.values():
        assert [part.finish_reason is not None for part in parts] == [False] * (len(parts) - 1) + [True]
        assert all(part.prompt_logprobs is None and part.embedding is None for part in parts[1:])
    return {
        request_id: TokenOutput(
            request_id=request_id,
            new_token_ids=[token for part in parts for token in part.new_token_ids],
            logprobs=[entry for part in parts for entry in part.logprobs or []],
            prompt_logprobs=parts[0].prompt_logprobs,
            embedding=parts[0].embedding,
            finish_reason=parts[-1].finish_reason,
            stop_reason=parts[-1].stop_reason,
            num_cached_tokens=parts[-1].num_cached_tokens,
            error=parts[-1].error,
            error_type=parts[-1].error_type,
            error_param=parts[-1].error_param,
        )
        for request_id, parts in merged.items()
    }


def token_ids(
    core: EngineCore, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[list[int]]:
    """Output ids of all prompts at once, in order."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
        add(core, str(index), prompt, own)
    outputs = finish(core)
    return [outputs[str(index)].new_token_ids for index in range(len(prompts))]
