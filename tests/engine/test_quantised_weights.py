"""The setting `quantization`, from checkpoint to logits."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import machine
from engine.attention.cpu import CPUAttention
from engine.checkpoints import Checkpoint, open_checkpoint
from engine.kernels import select_ops
from engine.kernels.ops import Ops
from engine.kernels.torch_ops import TorchOps
from engine.weights.loader import load_decoder
from engine.weights.mapping import modules
from engine.weights.precision import Precision, select_precision
from tests.engine.core_runs import make_core
from tests.engine.paged_runs import PagedRun, prefill, torch_ops
from tests.engine.test_models_logits import random_tokens
from tests.engine.tiny_gguf import Kind, write_gguf
from tests.engine.tiny_models import tiny_model, write_tiny

TOKENS = random_tokens(70)
Q, K, V = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")


def cpu_ops(checkpoint: Checkpoint, dtype: torch.dtype) -> Ops:
    ops, notes = select_ops(checkpoint.config, torch.device("cpu"), dtype)
    if isinstance(ops, TorchOps):
        pytest.skip(notes[0])
    return ops


def open_gguf(path: Path, kind: Kind = Kind.F32, kinds: dict[str, Kind] | None = None, **config: Any) -> Checkpoint:
    write_gguf(path / "m.gguf", tiny_model(**config), kind, kinds=kinds)
    return open_checkpoint(path / "m.gguf")


def open_floats(path: Path, **config: Any) -> Checkpoint:
    write_tiny(path, **config)
    return open_checkpoint(path)


def forms(checkpoint: Checkpoint, setting: str, field: str) -> list[str] | None:
    module = next(m for m in modules(checkpoint.config) if m.field == field)
    return Precision(setting).forms(checkpoint, module)


# ------------------------------------------------------------------------------------------------- the rule


@pytest.mark.parametrize(
    ("setting", "dtype", "packs", "effective", "is_noted"),
    [
        ("none", torch.bfloat16, True, "none", False),
        ("auto", torch.bfloat16, True, "auto", False),
        ("auto", torch.float32, True, "auto", False),
        ("auto", torch.float16, True, "auto", False),
        ("auto", torch.bfloat16, False, "none", False),
        ("int8", torch.bfloat16, True, "int8", False),
        ("int8", torch.float32, True, "int8", False),
        ("int4", torch.bfloat16, False, "int4", True),
        ("int8", torch.float32, False, "int8", True),
    ],
)
def test_setting_with_dtype_and_machine(
    setting: Any, dtype: torch.dtype, packs: bool, effective: str, is_noted: bool
) -> None:
    precision, notes = select_precision(setting, SimpleNamespace(packs_quantised=packs, packs_float8=False), dtype)
    assert precision.setting == effective
    assert bool(notes) == is_noted
    assert all(f"quantization {setting}" in note for note in notes)


def test_float32_by_name_is_exact() -> None:
    ops: Any = SimpleNamespace(packs_quantised=True, packs_float8=False)
    for setting, effective in (("auto", "none"), ("none", "none"), ("int8", "int8"), ("int4", "int4")):
        assert select_precision(setting, ops, torch.float32, is_exact=True)[0].setting == effective


@pytest.mark.parametrize(
    ("stored", "setting", "linear", "head"),
    [
        ("F32", "none", None, None),
        ("F32", "auto", None, None),
        ("F32", "int8", "int8", "int8"),
        ("F32", "int4", "int4", "int8"),
        ("Q4_0", "none", None, None),
        ("Q4_0", "auto", "Q4_0", "Q4_0"),
        ("Q4_0", "int8", "Q4_0", "Q4_0"),
        ("Q4_0", "int4", "Q4_0", "Q4_0"),
        ("Q8_0", "auto", "Q8_0", "Q8_0"),
        ("Q8_0", "int8", "Q8_0", "Q8_0"),
        ("Q8_0", "int4", "int4", "Q8_0"),
        ("Q5_1", "int4", "int4", "Q5_1"),
        ("F16", "auto", None, None),
        ("F16", "int8", "int8", "int8"),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_form_of_linears_and_head(
    tmp_path: Path, stored: str, setting: str, linear: str | None, head: str | None, tied: bool
) -> None:
    checkpoint = open_gguf(tmp_path, Kind[stored], num_hidden_layers=1, tie_word_embeddings=tied)
    assert forms(checkpoint, setting, "qkv") == (linear and [linear] * 3)
    assert forms(checkpoint, setting, "down") == (linear and [linear])
    assert forms(checkpoint, setting, "head") == (head and [head])


def test_parts_of_a_fused_layer_may_differ_but_not_in_being_quantised(tmp_path: Path) -> None:
    mixed = {Q: Kind.Q4_0, K: Kind.Q4_1, V: Kind.Q8_0}
    checkpoint = open_gguf(tmp_path, kinds=mixed, num_hidden_layers=1)
    assert forms(checkpoint, "auto", "qkv") == ["Q4_0", "Q4_1", "Q8_0"]
    checkpoint = open_gguf(tmp_path, kinds=mixed | {V: Kind.F16}, num_hidden_layers=1)
    assert forms(checkpoint, "auto", "qkv") is None
    assert forms(checkpoint, "int8", "qkv") == ["Q4_0", "Q4_1", "int8"]


def test_rows_that_are_not_whole_groups_stay_floats(tmp_path: Path) -> None:
    checkpoint = open_floats(tmp_path, intermediate_size=80, num_hidden_layers=2)
    assert forms(checkpoint, "int8", "down") is None
    assert forms(checkpoint, "int8", "gate_up") == ["int8", "int8"]
    assert Precision("int8").describe(checkpoint) == "int8 in 7 of 9 linear layers"


@pytest.mark.parametrize(
    ("kinds", "setting", "text"),
    [
        ({}, "none", "none"),
        ({}, "auto", "none"),
        ({}, "int8", "int8"),
        ({}, "int4", "int4"),
        ({Q: Kind.Q4_0, K: Kind.Q4_0, V: Kind.Q8_0}, "auto", "gguf (Q4_0, Q8_0) in 1 of 5 linear layers"),
        ({Q: Kind.Q4_0, K: Kind.Q4_0, V: Kind.Q8_0}, "int8", "gguf (Q4_0, Q8_0), int8"),
        ({Q: Kind.Q4_0, K: Kind.Q4_0, V: Kind.Q8_0}, "int4", "gguf (Q4_0), int4"),
    ],
    ids=str,
)
def test_description(tmp_path: Path, kinds: dict[str, Kind], setting: Any, text: str) -> None:
    checkpoint = open_gguf(tmp_path, kinds=kinds, num_hidden_layers=1)
    assert Precision(setting).describe(checkpoint) == text


def test_description_of_the_bundled_checkpoint(smollm2_path: Path) -> None:
    assert Precision("auto").describe(open_checkpoint(smollm2_path)) == "gguf (Q4_1, Q8_0)"


# ------------------------------------------------------------------------------------------------ the network


def logits(checkpoint: Checkpoint, setting: Any, dtype: torch.dtype) -> Tensor:
    """By the C++ kernels, of a prompt in two chunks and a token."""
    decoder = load_decoder(checkpoint, cpu_ops(checkpoint, dtype), dtype, precision=Precision(setting))
    run = PagedRun(decoder, [TOKENS], CPUAttention)
    return torch.cat([run.step({0: chunk})[0] for chunk in (TOKENS[:40], TOKENS[40:69], TOKENS[69:])])


def reference(checkpoint: Checkpoint, setting: Any = "none") -> Tensor:
    """By torch in float32, of the dequantised weights."""
    return prefill(
        load_decoder(checkpoint, torch_ops(checkpoint.config), torch.float32, precision=Precision(setting)), TOKENS
    )


def difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gguf_file_gives_the_logits_of_its_dequantised_weights(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    checkpoint = open_gguf(tmp_path, Kind[kind], attention_bias=True, mlp_bias=True)
    # Activations are rounded to 8 bits, and to bfloat16.
    assert difference(logits(checkpoint, "auto", dtype), reference(checkpoint)) < 0.03


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("tied", [True, False])
def test_k_types_lose_no_more_than_bfloat16_does(tmp_path: Path, kind: str, tied: bool) -> None:
    """Blocks are random, so how far an error grows differs by type; bfloat16's own error is the yardstick."""
    size = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    checkpoint = open_gguf(tmp_path, Kind[kind], tie_word_embeddings=tied, **size)
    exact, kept = reference(checkpoint), reference(checkpoint, "auto")
    in_bfloat16 = prefill(load_decoder(checkpoint, torch_ops(checkpoint.config), torch.bfloat16), TOKENS)
    yardstick = difference(in_bfloat16, exact)
    assert difference(kept, exact) < yardstick * (1.5 if kind == "Q6_K" else 0.2)
    assert difference(logits(checkpoint, "auto", torch.float32), kept) < 3 * yardstick  # activations of 8 bits


@pytest.mark.parametrize("setting", ["int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_rounded_floats_are_the_same_network_on_both_machines(tmp_path: Path, setting: str, tied: bool) -> None:
    checkpoint = open_floats(tmp_path, family="qwen2", tie_word_embeddings=tied)
    rounded = reference(checkpoint, setting)
    assert difference(logits(checkpoint, setting, torch.float32), rounded) < 0.03
    assert 0 < difference(rounded, reference(checkpoint)) < (0.03 if setting == "int8" else 0.4)


def test_layers_that_stay_floats_work_beside_quantised_ones(tmp_path: Path) -> None:
    checkpoint = open_floats(tmp_path, intermediate_size=80)
    assert difference(logits(checkpoint, "int8", torch.float32), reference(checkpoint, "int8")) < 0.03


@pytest.mark.parametrize("tied", [True, False])
def test_norms_stay_floats_and_a_tied_head_is_the_embedding(tmp_path: Path, tied: bool) -> None:
    checkpoint = open_gguf(tmp_path, Kind.Q4_0, tie_word_embeddings=tied)
    weights = load_decoder(
        checkpoint, cpu_ops(checkpoint, torch.bfloat16), torch.bfloat16, precision=Precision("auto")
    ).weights
    assert weights.final_norm.dtype == torch.bfloat16
    assert (weights.embed is weights.head) == tied
    assert (weights.head.bits, weights.layers[0].qkv.bits) == (4, 4)
    assert weights.num_parameters == tiny_model(tie_word_embeddings=tied).num_parameters()


def test_a_missing_tensor_is_named_before_anything_is_quantised(tmp_path: Path) -> None:
    checkpoint = open_floats(tmp_path)
    checkpoint = replace(checkpoint, tensors={n: t for n, t in checkpoint.tensors.items() if n != Q})
    with pytest.raises(Exception, match=f"{Q} is missing"):
        load_decoder(checkpoint, torch_ops(checkpoint.config), torch.float32, precision=Precision("int8"))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dtype": "float32"}, "none"),
        ({"dtype": "float32", "quantization": "int4"}, "int4"),
        ({"dtype": "bfloat16", "quantization": "int8"}, "int8"),
    ],
    ids=str,
)
def test_core_reports_how_weights_are_kept(tmp_path: Path, settings: dict[str, str], text: str) -> None:
    write_tiny(tmp_path)
    assert make_core(tmp_path, **settings).ready.quantization == text


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_stored_weights_stay_small_on_a_cpu_without_bfloat16(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_gguf(tmp_path, Kind[kind])
    [path] = tmp_path.glob("*.gguf")
    readies = {}
    for is_native in (True, False):
        monkeypatch.setattr(machine, "has_native_bfloat16", lambda is_native=is_native: is_native)
        readies[is_native] = make_core(path, dtype="auto", attention_backend="auto").ready
    assert [readies[native].dtype for native in (True, False)] == ["bfloat16", "float32"]
    assert readies[True].quantization == readies[False].quantization == f"gguf ({kind})"
    assert readies[False].weight_bytes < 1.1 * readies[True].weight_bytes
    assert "dtype: this CPU computes in float32 instead of bfloat16" in readies[False].notes
    exact = make_core(path, dtype="float32").ready
    assert exact.quantization == "none"
    assert exact.weight_bytes > 3 * readies[False].weight_bytes
    assert any(f"gguf ({kind}) are dequantised" in note for note in exact.notes)
