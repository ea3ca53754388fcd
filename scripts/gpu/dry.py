"""What stands in for a GPU in a dry run: the engine takes its kernels, and graphs are work that is done again."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from configs.settings import EngineConfig
from engine.attention.metadata import AttentionBackend
from engine.decode_graphs import DecodeGraphs
from engine.device import resolved
from engine.models.config import ModelConfig

BACKEND = "triton"


@contextmanager
def stand_ins() -> Iterator[None]:
    patches = {
        "engine.loading.select_ops": _triton_ops,
        "engine.start.resolved": _resolved,
        "engine.model_runner.DecodeGraphs": _graphs,
    }
    with ExitStack() as stack:
        for target, stand_in in patches.items():
            stack.enter_context(patch(target, stand_in))
        yield


def _triton_ops(config: ModelConfig, *_: Any, **options: Any) -> tuple[Any, list[str]]:
    from engine.kernels.gpu.ops import TritonOps

    shape = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    return TritonOps(**shape, norm_eps=config.rms_norm_eps, form=config.form), []


def _resolved(config: EngineConfig, device: torch.device) -> EngineConfig:
    """With graphs, if they are wanted."""
    return msgspec.structs.replace(resolved(config, device), cuda_graphs=config.cuda_graphs)


def _graphs(compute: Any, backend: AttentionBackend, **sizes: Any) -> DecodeGraphs:
    def record(work: Callable[[], None]) -> Callable[[], None]:
        work()
        captured = dict(vars(backend))

        def replay() -> None:
            """With what was prepared when it was captured, as a graph keeps its addresses."""
            now = dict(vars(backend))
            vars(backend).update(captured)
            work()
            vars(backend).update(now)

        return replay

    return DecodeGraphs(compute, backend, **sizes, record=record)
