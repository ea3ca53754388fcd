"""Layer operations by torch.compile."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from configs.errors import SettingsError
from engine.checkpoints import open_checkpoint
from engine.kernels import select_ops
from engine.kernels.compiled import CompiledOps
from engine.models.decoder import Decoder
from tests.engine.core_runs import make_core
from tests.engine.paged_runs import PagedRun, load
from tests.engine.test_models_logits import random_tokens
from tests.engine.tiny_models import write_tiny

PROMPTS = [random_tokens(60, seed=seed) for seed in range(3)]


def compiled(path: Path) -> Decoder:
    config = open_checkpoint(path).config
    ops, notes = select_ops(config, torch.device("cpu"), torch.float32, compiled=True)
    assert isinstance(ops, CompiledOps)
    assert not notes
    return load(path, ops=ops)


def assert_equal_logits(ours: Decoder, expected: Decoder, sizes: list[tuple[int, ...]]) -> None:
    """Of steps with so many tokens of each sequence."""
    runs = [PagedRun(decoder, PROMPTS) for decoder in (ours, expected)]
    for step in sizes:
        chunks = {seq: PROMPTS[seq][runs[0].computed[seq] :][:size] for seq, size in enumerate(step) if size}
        with torch.inference_mode():
            got, wanted = (run.step(chunks) for run in runs)
        for seq in chunks:
            torch.testing.assert_close(got[seq], wanted[seq], atol=1e-4, rtol=1e-4)


STEPS = [(8, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1), (1, 17, 5), (1, 1, 38), (0, 0, 1)]
"""Of 1, 2, 3, 8, 23 and 40 tokens."""


def test_steps_of_any_size_take_two_graphs_of_each_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path, "qwen3", attention_bias=True, tie_word_embeddings=True)
    counter = CompileCounterWithBackend("eager")
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    assert_equal_logits(compiled(tmp_path), load(tmp_path), STEPS)
    assert counter.frame_count == 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_networks_give_the_logits_of_plain_torch(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3")
    torch.compiler.reset()
    assert_equal_logits(compiled(tmp_path), load(tmp_path), STEPS)


def test_a_compiler_that_fails_ends_the_start_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no g++\nat line 1")

    write_tiny(tmp_path)
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    with pytest.raises(
        SettingsError, match=r"^torch_compile: torch cannot compile on this machine \(RuntimeError: no g\+\+\); leave"
    ):
        make_core(tmp_path, torch_compile=True)
