"""Packed layouts, types and the progress bar of the loader."""

from pathlib import Path

import pytest
import torch

from engine.kernels import torch_ops as torch_ops_module
from engine.kernels.torch_ops import OneDNNLinear, TorchLinear, onednn_packs
from engine.weights import loader
from tests.engine.paged_runs import load, prefill
from tests.engine.test_models_logits import hf_logits, random_tokens
from tests.engine.tiny_models import write_tiny

TOKENS = random_tokens(64)


def test_machine_layout_and_plain_layout_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path, "qwen2")
    packed = load(tmp_path)
    if onednn_packs(torch.ones(2, 2)):
        assert isinstance(packed.weights.layers[0].qkv, OneDNNLinear)
    monkeypatch.setattr(torch_ops_module, "onednn_packs", lambda weight: False)
    plain = load(tmp_path)
    assert isinstance(plain.weights.layers[0].qkv, TorchLinear)
    torch.testing.assert_close(prefill(packed, TOKENS), prefill(plain, TOKENS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    model = write_tiny(tmp_path, "qwen3", num_hidden_layers=1)
    decoder = load(tmp_path, dtype)
    assert decoder.dtype == dtype
    ours, theirs = prefill(decoder, TOKENS), hf_logits(model, TOKENS)
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().mean() < 0.03 * theirs.abs().mean()


def test_parameters_are_counted_as_transformers_counts_them(tmp_path: Path) -> None:
    for tied in (True, False):
        model = write_tiny(tmp_path, "qwen2", tie_word_embeddings=tied)
        assert load(tmp_path).weights.num_parameters == model.num_parameters()


def test_progress_only_when_the_load_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(tmp_path)
    capsys.readouterr()
    load(tmp_path)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(loader, "PROGRESS_AFTER_SECONDS", 0.0)
    load(tmp_path)
    captured = capsys.readouterr()
    assert "Loading weights" in captured.err
    assert captured.out == ""
