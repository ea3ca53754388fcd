"""nano-vllm's benchmark: 256 requests at once, of 100 to 1024 tokens in and out, on Qwen3-0.6B's shape."""

import random

from configs.sampling import SamplingParams

from .bench import Bench
from .engine_runs import Work, count_until, make_core, random_prompt
from .random_checkpoint import served
from .shapes import DRY_QWEN3, QWEN3_600M

VOCABULARY = 10001
"""Of the prompts: with it the lengths are those of that benchmark as well."""
WARM_UP_SECONDS = 25.0
SETTINGS = {"max_num_seqs": 256, "max_num_batched_tokens": 16384, "kv_cache_tokens": 2**19, "max_model_len": 4096}


def nano_vllm_work(num_requests: int, tokens: tuple[int, int], vocab_size: int) -> Work:
    """Sampled at temperature 0.6, all to their exact lengths; the same for every call."""
    source = random.Random(0)
    prompts = [random_prompt(source, source.randint(*tokens), vocab_size) for _ in range(num_requests)]
    return [
        (prompt, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=source.randint(*tokens)))
        for prompt in prompts
    ]


def run(bench: Bench) -> None:
    is_dry = bench.plan.is_dry
    work = nano_vllm_work(2, (2, 4), 90) if is_dry else nano_vllm_work(256, (100, 1024), VOCABULARY)
    settings = {} if is_dry else SETTINGS
    with served(DRY_QWEN3 if is_dry else QWEN3_600M):
        core = make_core(bench.plan, **settings)
    # The same batches once before, as that benchmark warms up too: whatever is compiled or captured then is there.
    count_until(core, nano_vllm_work(*((1, (1, 2), 90) if is_dry else (256, (30, 60), VOCABULARY))), WARM_UP_SECONDS)
    tokens, seconds, ended = count_until(core, work, max(5.0, bench.left - 2))
    bench.measure(
        "tiny" if is_dry else "nano-vllm",
        output_tokens_per_second=tokens / seconds,
        output_tokens=tokens,
        requests=len(work),
        ended=ended,
        seconds=seconds,
        backend=core.ready.attention_backend,
    )
