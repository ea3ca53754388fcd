"""Weights on a GPU: the way there, packed forms and float8. Kernels run in Triton's interpreter."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from configs.errors import CheckpointError, SettingsError
from engine.checkpoints import Checkpoint, StoredTensor, open_checkpoint
from engine.kernels.quantised import Float8Weight, QuantisedWeight
from engine.kernels.torch_ops import TorchOps
from engine.models.decoder import Decoder
from engine.weights import loader
from engine.weights.dequantise import read_into, stored_bytes
from engine.weights.loader import load_decoder
from engine.weights.mapping import modules
from engine.weights.precision import Precision, select_precision
from engine.weights.quantise import read_quantised
from engine.weights.staging import Staging
from tests.engine.float8_folders import BLOCK, LAYOUTS, save, write_float8
from tests.engine.paged_runs import prefill, torch_ops
from tests.engine.test_models_logits import random_tokens
from tests.engine.test_weights_quantised import floats, in_blocks, normal, stored
from tests.engine.tiny_gguf import Kind, write_gguf
from tests.engine.tiny_models import tiny_model, write_tiny

pytest.importorskip("triton")

from engine.kernels.gpu.float8 import Float8Linear, round_tokens
from engine.kernels.gpu.ops import TritonOps
from engine.kernels.gpu.quantised import FEW_ROWS, PackedWeight, QuantisedLinear, few_rows_linear, split

TOKENS = random_tokens(20)
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6}
"""Of a large element (4 standard deviations); the interpreter cuts off where a GPU rounds to bfloat16."""
HOPPER = (9, 0)


def triton_ops(checkpoint: Checkpoint) -> TritonOps:
    return TritonOps(**vars_of(checkpoint))


def vars_of(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    sizes = {name: getattr(config, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
    return sizes | {"norm_eps": config.rms_norm_eps}


# ------------------------------------------------------------------------------------------------ the way there


class LateLink:
    """Copies happen when somebody waits for them, as late as a GPU might."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.queue: list[tuple[Tensor, Tensor]] = []
        self.pinned: list[int] = []
        self.copied: list[int] = []  # bytes

    def pin(self, num_bytes: int) -> Tensor:
        self.pinned.append(num_bytes)
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def copy(self, out: Tensor, host: Tensor) -> None:
        self.queue.append((out, host))
        self.copied.append(host.nbytes)

    def mark(self) -> Callable[[], object]:
        until = list(self.queue)
        return lambda: self.finish(until)

    def finish(self, copies: list[tuple[Tensor, Tensor]] | None = None) -> None:
        """All that was asked for until now, or of `copies` those that are left."""
        wanted = set(map(id, self.queue if copies is None else copies))
        for out, host in (pair for pair in self.queue if id(pair) in wanted):
            out.copy_(host)
        self.queue = [pair for pair in self.queue if id(pair) not in wanted]


STORED: dict[str, Callable[[], StoredTensor]] = {
    "F32": lambda: floats(normal(37, 64)),
    "F16": lambda: stored(normal(37, 64).astype(np.float16), "F16", 37, 64),
    "BF16": lambda: stored(torch.from_numpy(normal(37, 64)).bfloat16().view(torch.uint8).numpy(), "BF16", 37, 64),
    "F64 norm": lambda: stored(normal(1, 64).astype(np.float64), "F64", 1, 64),
    "Q4_0": lambda: in_blocks("Q4_0", 37, 64)[0],
    "Q6_K": lambda: in_blocks("Q6_K", 37, 512)[0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", STORED)
def test_staged_tensors_equal_those_read_in_place(kind: str, dtype: torch.dtype) -> None:
    part = STORED[kind]()
    part = replace(part, shape=part.shape[1:]) if part.shape[0] == 1 else part
    link, expected, out = LateLink(), torch.empty(part.shape, dtype=dtype), torch.zeros(part.shape, dtype=dtype)
    read_into(expected, part)
    read_into(out, part, Staging(link, piece_bytes=1000))
    link.finish()
    assert torch.equal(out, expected)


def test_pieces_are_whole_rows_and_travel_in_the_stored_type() -> None:
    link, part = LateLink(), STORED["BF16"]()
    read_into(torch.empty(37, 64), part, Staging(link, piece_bytes=1000))
    assert link.copied == [7 * 128] * 5 + [2 * 128]
    assert link.pinned == [1000, 1000]
    link = LateLink()
    read_into(torch.empty(37, 64), part, Staging(link, piece_bytes=100))
    assert link.copied == [128] * 37, "a row that is longer than a piece goes alone"


def test_each_thread_has_two_buffers_for_all_its_tensors() -> None:
    link, part = LateLink(), STORED["F32"]()
    staging, outs = Staging(link, piece_bytes=1024), [torch.zeros(37, 64) for _ in range(8)]
    with ThreadPoolExecutor(1) as pool:
        for out in outs:
            pool.submit(read_into, out, part, staging).result()
    assert link.pinned == [1024] * 2
    link.finish()
    assert all(torch.equal(out, outs[0]) for out in outs)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(read_into, outs[0], part, staging).result()
    assert link.pinned == [1024] * 4


@pytest.mark.parametrize("forms", [["Q4_1", "Q8_0"], ["Q4_0", "int4"]], ids=str)
def test_staged_quantised_weights_equal_those_read_in_place(forms: list[str]) -> None:
    kinds, link = [form.replace("int4", "Q5_0") for form in forms], LateLink()
    parts = [in_blocks(kind, 21, 64, seed)[0] for seed, kind in enumerate(kinds)]
    expected, weight = read_quantised(parts, forms), read_quantised(parts, forms, Staging(link, piece_bytes=500))
    link.finish()
    assert weight.bits == expected.bits
    for name in ("q", "scale", "minimum"):
        assert torch.equal(getattr(weight, name), getattr(expected, name)), name
    assert len(link.copied) == 2 * 3 * 4  # 6 rows of 64 + 4 + 4 bytes each


def test_a_weight_that_is_not_finite_is_refused_on_the_way_too() -> None:
    values = normal(9, 64)
    values[8, 3] = np.nan
    with pytest.raises(CheckpointError, match="not finite"):
        read_quantised([floats(values)], ["int8"], Staging(LateLink(), piece_bytes=200))


@pytest.mark.parametrize("setting", ["none", "int4"])
def test_staged_networks_equal_those_read_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: Any
) -> None:
    write_tiny(tmp_path, "qwen3", attention_bias=True)
    checkpoint, precision = open_checkpoint(tmp_path), Precision(setting)

    def logits() -> Tensor:
        decoder = load_decoder(checkpoint, torch_ops(checkpoint.config), torch.float32, precision=precision)
        return prefill(decoder, TOKENS)

    expected = logits()

    class Prompt(LateLink):
        def copy(self, out: Tensor, host: Tensor) -> None:
            out.copy_(host)

    monkeypatch.setattr(loader, "select_placement", lambda device: Staging(Prompt(), 3000))
    assert torch.equal(logits(), expected)


# ------------------------------------------------------------------------------------------------ 8 and 4 bits


def quantised(bits: int, rows: int, columns: int, *, is_symmetric: bool = False, seed: int = 0) -> QuantisedWeight:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 2**bits, (rows, columns), generator=generator, dtype=torch.uint8)
    scale = (torch.rand(rows, columns // 32, generator=generator) * 0.02).half()
    free = (torch.randn(rows, columns // 32, generator=generator) * 0.1).half()
    return QuantisedWeight(bits, q, scale, scale * -(2 ** (bits - 1)) if is_symmetric else free)


def activations(rows: int, columns: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype, size: Tensor) -> None:
    """`size` [like expected]: how far sums of such terms spread. A sum itself may be near zero by chance."""
    assert (actual.float() - expected).abs().max() <= TOLERANCE[dtype] * 4 * size.max()


@pytest.mark.parametrize("is_symmetric", [False, True], ids=["with minima", "symmetric"])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_take_their_bits_and_dequantise_exactly(bits: int, is_symmetric: bool) -> None:
    weight = quantised(bits, 19, 160, is_symmetric=is_symmetric)
    packed = PackedWeight.pack(weight)
    assert packed.codes.nbytes == 19 * 160 * bits // 8
    assert packed.steps.nbytes == 19 * 5 * (2 if is_symmetric else 4)
    for begin, end in ((0, 19), (3, 18)):
        out = torch.empty(end - begin, 160)
        packed.dequantise(begin, end, out)
        torch.testing.assert_close(out, weight.dequantise()[begin:end], rtol=0, atol=1e-7)  # a sum may be fused


@settings(max_examples=16, deadline=None)
@given(
    st.sampled_from([4, 8]),
    st.booleans(),
    st.sampled_from([1, 16, 65, 130]),
    st.sampled_from([32, 96, 1056]),
    st.sampled_from([1, 2, 17, 32, 33, FEW_ROWS, FEW_ROWS + 1, FEW_ROWS + 6]),
    st.sampled_from([torch.float16, torch.float16, torch.bfloat16, torch.float32]),
    st.booleans(),
)
def test_linear_equals_the_product_with_the_dequantised_weight(
    bits: int, is_symmetric: bool, rows: int, columns: int, num_tokens: int, dtype: torch.dtype, has_bias: bool
) -> None:
    weight, x = quantised(bits, rows, columns, is_symmetric=is_symmetric), activations(num_tokens, columns, dtype)
    bias = activations(1, rows, dtype, seed=2)[0] * 3 if has_bias else None
    linear = QuantisedLinear(PackedWeight.pack(weight), bias)
    factors = x.float(), weight.dequantise().to(dtype).float().T
    expected, squares = factors[0] @ factors[1], factors[0] ** 2 @ factors[1] ** 2
    if bias is not None:
        expected, squares = expected + bias.float(), squares + bias.float() ** 2
    got = linear(x)
    assert got.dtype == dtype
    assert_near(got, expected, dtype, squares.sqrt())
    sums = linear(x, torch.float32)
    assert sums.dtype == torch.float32
    if num_tokens <= FEW_ROWS and dtype == torch.float16:
        assert_near(sums, expected, torch.float32, squares.sqrt())


def test_rows_in_pieces_equal_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = PackedWeight.pack(quantised(4, 50, 64)), activations(FEW_ROWS + 3, 64, torch.float32)
    bias = activations(1, 50, torch.float32)[0]
    for linear in (QuantisedLinear(weight, bias), QuantisedLinear(weight, None)):
        expected = linear(x)
        monkeypatch.setattr("engine.kernels.gpu.quantised.DEQUANTISED_AT_ONCE", 64 * 16)
        torch.testing.assert_close(linear(x), expected)
        monkeypatch.undo()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_token_has_the_same_bits_alone_and_among_others(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits and blocks are the same for any number of tokens. Inside a block a GPU adds in one order; the
    interpreter's products are numpy's, whose order depends on the processor and the shape, so it is given an order."""

    def in_order(a: np.ndarray, b: np.ndarray, dtype: type) -> np.ndarray:
        total = np.zeros((a.shape[0], b.shape[1]), dtype)
        for k in range(a.shape[1]):
            total += a[:, k, None].astype(dtype) * b[k].astype(dtype)
        return total

    monkeypatch.setattr(np, "matmul", in_order)
    weight, x = PackedWeight.pack(quantised(bits, 70, 2048)), activations(40, 2048, torch.float16)
    together = few_rows_linear(x, weight, None, torch.float16)
    assert split(70, 64, bits)[0] > 1
    for rows in (slice(0, 1), slice(39, 40), slice(5, 25)):
        assert torch.equal(few_rows_linear(x[rows], weight, None, torch.float16), together[rows])


@given(st.integers(1, 200_000), st.integers(1, 4000), st.sampled_from([4, 8]))
def test_splits_cover_the_columns_without_an_empty_one(rows: int, groups: int, bits: int) -> None:
    splits, blocks_per_split = split(rows, groups, bits)
    per_split = blocks_per_split * {8: 4, 4: 8}[bits]
    assert (splits - 1) * per_split < groups <= splits * per_split


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_gguf_files_keep_their_form_and_give_the_logits_of_their_dequantised_weights(tmp_path: Path, kind: str) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model(num_hidden_layers=1, attention_bias=True), Kind[kind])
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    ops = triton_ops(checkpoint)
    precision, notes = select_precision("auto", ops, torch.float16, HOPPER)
    assert not notes
    decoder = load_decoder(checkpoint, ops, torch.float16, precision=precision)
    assert isinstance(decoder.weights.layers[0].qkv, QuantisedLinear)
    reference = load_decoder(checkpoint, torch_ops(checkpoint.config), torch.float32)
    assert difference(prefill(decoder, TOKENS), prefill(reference, TOKENS)) < 2e-3


def difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


# ----------------------------------------------------------------------------------------------------- float8


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tokens_are_rounded_as_rows_of_weights_are(dtype: torch.dtype) -> None:
    x = activations(5, 576, dtype) * torch.tensor([1, 100, 1e-4, 0, 1], dtype=dtype)[:, None]
    numbers, scale = round_tokens(x)
    expected = Float8Weight.round(x)
    assert torch.equal(numbers.float(), expected.numbers.float())
    assert torch.equal(scale[:, 0], expected.scale)
    rounded = numbers.float() * scale
    # Three bits of mantissa, and steps of the smallest number (2**-9) near zero.
    bound = torch.maximum(x.float().abs() * 2**-4, scale * 2**-10) * 1.001
    assert torch.all((rounded - x.float()).abs() <= bound)


def test_float8_linear_multiplies_the_rounded_factors_exactly() -> None:
    x, weight = activations(7, 96, torch.bfloat16), Float8Weight.round(activations(48, 96, torch.float32, seed=3))
    bias = activations(1, 48, torch.bfloat16)[0]
    numbers, scale = round_tokens(x)
    expected = (numbers.float() * scale) @ weight.dequantise().T + bias.float()
    squares = (numbers.float() * scale) ** 2 @ weight.dequantise().T ** 2 + bias.float() ** 2
    got = Float8Linear(weight.numbers, weight.scale, bias)(x)
    assert got.dtype == torch.bfloat16
    assert_near(got, expected, torch.bfloat16, squares.sqrt())
    assert Float8Linear(weight.numbers, weight.scale, None)(x[:0]).shape == (0, 48)


def test_pieces_of_a_weight_are_rounded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = activations(50, 64, torch.bfloat16)
    whole = Float8Weight.round(weight)
    monkeypatch.setattr("engine.kernels.quantised.FLOAT8_AT_ONCE", 64 * 7)
    assert torch.equal(whole.numbers.view(torch.uint8), Float8Weight.round(weight).numbers.view(torch.uint8))


class EmulatedOps(TorchOps):
    """Float8 layers in float32, of rounded factors; products are rounded to bfloat16."""

    packs_float8 = True

    def pack_float8(self, name: str, weight: Float8Weight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        def linear(x: Tensor) -> Tensor:
            product = F.linear(Float8Weight.round(x).dequantise(), weight.dequantise()).bfloat16().float()
            return product if bias is None else product + bias

        return linear


def test_networks_in_float8_equal_their_emulation(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen2", intermediate_size=72, num_hidden_layers=2)  # `down`: rows of no multiple of 16
    checkpoint = open_checkpoint(tmp_path)
    ops = triton_ops(checkpoint)
    precision, _ = select_precision("fp8", ops, torch.bfloat16, HOPPER)
    assert precision.describe(checkpoint) == "fp8 in 6 of 9 linear layers"
    decoder = load_decoder(checkpoint, ops, torch.float32, precision=precision)
    layer = decoder.weights.layers[0]
    kinds = [isinstance(linear, Float8Linear) for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    assert kinds == [True, True, True, False]
    assert not isinstance(decoder.weights.head, Float8Linear)
    emulated = load_decoder(checkpoint, EmulatedOps(**vars_of(checkpoint)), torch.float32, precision=precision)
    reference = load_decoder(checkpoint, torch_ops(checkpoint.config), torch.float32)
    got, expected, floats = (prefill(network, TOKENS) for network in (decoder, emulated, reference))
    assert difference(got, expected) < 0.01
    assert 0.02 < difference(got, floats) < 0.12


def test_weights_that_are_not_finite_are_refused_in_float8(tmp_path: Path) -> None:
    model = tiny_model(num_hidden_layers=1)
    model.model.layers[0].mlp.down_proj.weight.data[3, 5] = torch.nan
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"mlp\.down_proj\.weight: a weight is not finite; --quantization none"):
        load_decoder(checkpoint, triton_ops(checkpoint), torch.float32, precision=Precision("fp8", keeps_float8=True))


@pytest.mark.parametrize(
    ("capability", "packs", "words"),
    [
        ((0, 0), False, "needs a GPU of compute capability 8.9 or newer (Ada, Hopper); this is a CPU"),
        ((8, 0), True, "needs a GPU of compute capability 8.9 or newer (Ada, Hopper); this one has 8.0"),
        ((9, 0), False, "needs the Triton kernels, which are not in use"),
    ],
)
def test_float8_is_refused_where_it_cannot_be_multiplied(capability: tuple[int, int], packs: bool, words: str) -> None:
    ops: Any = SimpleNamespace(packs_quantised=True, packs_float8=packs)
    with pytest.raises(SettingsError) as error:
        select_precision("fp8", ops, torch.bfloat16, capability)
    assert str(error.value) == f"quantization fp8 {words}: take int8 or int4"


# --------------------------------------------------------------------------------------- stored in float8


def forms(checkpoint: Checkpoint, precision: Precision) -> dict[str, list[str] | None]:
    return {m.field: precision.forms(checkpoint, m) for m in modules(checkpoint.config) if m.is_linear}


def decoder_of(path: Path, precision: Precision, ops: Callable[[Checkpoint], Any], dtype: torch.dtype) -> Decoder:
    checkpoint = open_checkpoint(path)
    return load_decoder(checkpoint, ops(checkpoint), dtype, precision=precision)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stored_float8_gives_the_logits_of_its_dequantised_weights(tmp_path: Path, layout: str) -> None:
    write_float8(tmp_path / "stored", tmp_path / "floats", layout)

    def plain(checkpoint: Checkpoint) -> Any:
        return torch_ops(checkpoint.config)

    expected = prefill(decoder_of(tmp_path / "floats", Precision("none"), plain, torch.float32), TOKENS)
    for setting in ("none", "auto"):
        got = prefill(decoder_of(tmp_path / "stored", Precision(setting), plain, torch.float32), TOKENS)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    rounded = prefill(decoder_of(tmp_path / "stored", Precision("int8"), plain, torch.float32), TOKENS)
    assert 1e-4 < difference(rounded, expected) < 0.03
    native = Precision("auto", keeps_float8=True)
    layer = forms(open_checkpoint(tmp_path / "stored"), native)
    assert layer["qkv"] == (None if layout == BLOCK else ["F8_E4M3"] * 3)
    assert layer["head"] is None
    decoder = decoder_of(tmp_path / "stored", native, triton_ops, torch.bfloat16)
    assert difference(prefill(decoder, TOKENS), expected) < 0.12


def test_stored_float8_is_kept_byte_for_byte(tmp_path: Path) -> None:
    write_float8(tmp_path / "stored", tmp_path / "floats", "channel")
    checkpoint, precision = open_checkpoint(tmp_path / "stored"), Precision("fp8", keeps_float8=True)
    assert precision.describe(checkpoint) == "fp8 as stored in 8 of 9 linear layers"
    decoder = load_decoder(checkpoint, triton_ops(checkpoint), torch.bfloat16, precision=precision)
    part = checkpoint.tensors["model.layers.1.mlp.down_proj.weight"]
    linear = decoder.weights.layers[1].down
    assert linear.numbers.view(torch.uint8).numpy().tobytes() == stored_bytes(part).tobytes()
    read = torch.empty(part.shape)
    read_into(read, part)
    torch.testing.assert_close(linear.numbers.float() * linear.scale[:, None], read)


def edit_config(folder: Path, **quantization: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = config.get("quantization_config", {}) | quantization
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "awq"}, r"config\.json: quantization_config \(awq\) is not supported; float8 is"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": "int", "num_bits": 4}}}},
            r"quantization_config \(compressed-tensors, int4\) is not supported",
        ),
    ],
    ids=["awq", "compressed int4"],
)
def test_other_quantised_folders_are_refused(tmp_path: Path, quantization: dict[str, Any], words: str) -> None:
    write_tiny(tmp_path)
    edit_config(tmp_path, **quantization)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)


def test_float8_without_a_fitting_scale_is_refused(tmp_path: Path) -> None:
    tensors = write_float8(tmp_path / "stored", tmp_path / "floats", "channel")
    name = "model.layers.0.mlp.down_proj.weight"
    scale = tensors.pop(f"{name}_scale")
    cut = {f"{name}_scale": scale[:3]}
    for changed, words in (({}, "has no weight_scale"), (cut, r"\[3, 1\] does not fit a weight of 64 rows")):
        save(tensors | changed, tmp_path / "stored")
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(tmp_path / "stored")
