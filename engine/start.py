"""From settings to an `EngineCore` that is ready to answer. What works in threads is made here and handed to it."""

import contextlib
import time
from collections.abc import Iterator

from configs.errors import SettingsError
from configs.sampling import SamplingParams
from configs.settings import EngineConfig
from scheduler.scheduler import Scheduler

from .bundled import locate_model
from .checkpoints import open_checkpoint
from .core import EngineCore
from .device import ResolvedConfig, device_name, resolved, select_device, set_threads
from .input_batch import InputBatch
from .kv_cache import plan_num_blocks
from .loading import LoadedModel, load_model
from .machine import usable_cores
from .memory_profile import measured_free_bytes
from .messages import AddRequest, CoreReady
from .model_runner import ModelRunner
from .models.config import ModelConfig
from .structured.compiler import load_compiler
from .structured.languages import ThreadedLanguages
from .structured.trial import TrialProcess


def start_core(config: EngineConfig) -> EngineCore:
    """Load the model and answer one small request, so that the first real one is not slow.

    Raises `UsageError` when the settings, the checkpoint and the machine do not go together.
    """
    timings: dict[str, float] = {}
    config = resolved(config, select_device(config.device))
    num_threads = config.num_threads or usable_cores()
    set_threads(num_threads)
    with _timed("checkpoint", timings):
        checkpoint = open_checkpoint(locate_model(config.model))
    max_model_len = max_context(config, checkpoint.config)
    with _timed("weights", timings):
        model = load_model(config, checkpoint)
    spec, weights = model.spec, model.decoder.weights
    with _timed("kv_cache", timings):
        free_bytes, block_bytes = measured_free_bytes(model, config, max_model_len), spec.block_bytes
        num_blocks, notes = plan_num_blocks(
            config, block_bytes=block_bytes, max_model_len=max_model_len, free_bytes=free_bytes
        )
        model.backend.allocate(num_blocks)
    core = _make_core(config, model, num_blocks, max_model_len)
    with _timed("warm_up", timings):
        _warm_up(core)
    core.ready = CoreReady(
        architecture=checkpoint.config.architecture,
        num_parameters=weights.num_parameters,
        weight_bytes=weights.bytes_per_step,
        kv_bytes_per_token=spec.block_bytes // spec.block_size,
        dtype=str(spec.dtype).removeprefix("torch."),
        kv_cache_dtype=str(spec.kv_cache_dtype or spec.dtype).removeprefix("torch."),
        quantization=model.quantization,
        device=device_name(spec.device),
        attention_backend=model.backend.name,
        notes=[*model.notes, *notes],
        vocab_size=checkpoint.config.vocab_size,
        max_model_len=max_model_len,
        kv_cache_tokens=(num_blocks - 1) * config.block_size,
        block_size=config.block_size,
        num_threads=num_threads,
        timings=timings,
    )
    return core


def max_context(config: EngineConfig, model: ModelConfig) -> int:
    """Most tokens of a request. Raises `SettingsError` when more are asked for than the checkpoint can tell apart."""
    limit = model.max_position_embeddings
    rope, scaling = model.rope.rope_type, model.rope.parameters
    if rope in ("linear", "dynamic"):  # their factor extends the length that is configured beside it
        limit = int(limit * scaling["factor"])
    elif rope == "yarn" and scaling.get("factor"):  # checkpoints give the length before or after the extension
        limit = max(limit, int(scaling["original_max_position_embeddings"] * scaling["factor"]))
    limit = min(limit, model.context_limit or limit)
    if config.max_model_len is None:
        return limit
    if not 1 <= config.max_model_len <= limit:
        raise SettingsError(f"max_model_len must be between 1 and the checkpoint's {limit}; got {config.max_model_len}")
    return config.max_model_len


def _make_core(config: ResolvedConfig, model: LoadedModel, num_blocks: int, max_model_len: int) -> EngineCore:
    spec, model_config = model.spec, model.decoder.config
    windows = set(spec.windows)
    scheduler = Scheduler(
        config,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        sliding_window=windows.pop() if len(windows) == 1 else None,
    )
    languages = ThreadedLanguages(lambda: load_compiler(config), TrialProcess(config))
    batch = InputBatch(
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        block_size=config.block_size,
        language_of=languages.of,
        penalties=model.decoder.ops.make_penalties(model_config.vocab_size, spec.device),
    )
    runner = ModelRunner(model.decoder, model.backend, batch, spec.device, cuda_graphs=config.cuda_graphs)
    return EngineCore(config, model_config, scheduler, runner, languages)


def _warm_up(core: EngineCore) -> None:
    """One request of several tokens, then one token: the libraries prepare what both kinds of step need."""
    length = min(8, core.scheduler.max_total_tokens - 2)
    if length < 1:
        return
    # top_p and a penalty: all kernels of sampling
    params = SamplingParams(max_tokens=2, seed=0, ignore_eos=True, top_p=0.9, repetition_penalty=1.1)
    core.add_request(AddRequest(request_id="warm-up", prompt_token_ids=[0] * length, sampling_params=params))
    while core.has_work:
        core.step()


@contextlib.contextmanager
def _timed(phase: str, timings: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    timings[phase] = time.perf_counter() - start
