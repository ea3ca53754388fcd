"""Weights of 8 and 4 bits, from GGUF's blocks and from floats, against the gguf package and stated errors."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from configs.errors import CheckpointError
from engine.checkpoints import StoredTensor
from engine.kernels.quantised import QuantisedWeight
from engine.weights.gguf_blocks import BLOCK_BYTES, unpack
from engine.weights.quantise import ELEMENTS_AT_ONCE, read_quantised
from tests.engine.tiny_gguf import Kind, quantised

EXACT = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
FLOAT_KINDS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


def normal(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) * 0.05


def stored(data: np.ndarray, kind: str, rows: int, columns: int) -> StoredTensor:
    raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    return StoredTensor("t", Path("f.gguf"), "blk.0.t", (rows, columns), kind, raw.size, lambda: raw)


def in_blocks(kind: str, rows: int = 6, columns: int = 512, seed: int = 0) -> tuple[StoredTensor, np.ndarray]:
    """A stored tensor and what the gguf package makes of it."""
    data = quantised(normal(rows, columns, seed), Kind[kind])
    return stored(data, kind, rows, columns), gguf.dequantize(data, Kind[kind])


def floats(values: np.ndarray) -> StoredTensor:
    return stored(values, "F32", *values.shape)


def read(part: StoredTensor, form: str) -> QuantisedWeight:
    return read_quantised([part], [form])


def relative_rms(actual: torch.Tensor, expected: np.ndarray) -> float:
    return float((actual - torch.from_numpy(expected)).norm() / np.linalg.norm(expected))


@pytest.mark.parametrize("kind", EXACT)
def test_blocks_of_one_scale_are_kept_without_loss(kind: str) -> None:
    part, expected = in_blocks(kind)
    weight = read(part, kind)
    assert weight.bits == (4 if kind.startswith("Q4") else 8)
    assert int(weight.q.max()) < 2**weight.bits
    assert (weight.q.dtype, weight.scale.dtype, weight.minimum.dtype) == (torch.uint8, torch.float16, torch.float16)
    assert torch.equal(weight.dequantise(), torch.from_numpy(expected))


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
def test_blocks_of_eight_scales_lose_what_float16_rounds(kind: str) -> None:
    part, expected = in_blocks(kind)
    groups = unpack(part.read(), kind)
    # Both products of the block's and the group's scale are rounded by at most 2**-11.
    bound = (np.abs(groups.scale * groups.q) + np.abs(groups.minimum)).reshape(expected.shape) * 2.0**-11 + 2.0**-24
    weight = read(part, kind)
    assert weight.bits == (4 if kind == "Q4_K" else 8)
    assert np.all(np.abs(weight.dequantise().numpy() - expected) <= bound)
    assert relative_rms(weight.dequantise(), expected) < 5e-4


def test_q6_k_keeps_the_half_of_the_larger_scale_and_rounds_the_other() -> None:
    part, expected = in_blocks("Q6_K", rows=40)
    scale = np.abs(unpack(part.read(), "Q6_K").scale).reshape(-1, 2)
    error = np.abs(read(part, "Q6_K").dequantise().numpy() - expected).reshape(-1, 2, 16).max(2)
    larger = scale.max(1, keepdims=True)
    float16 = larger * 32 * 2.0**-10 + 2.0**-18  # of the step, times up to 128
    owns = scale == larger
    one_owner = owns.sum(1, keepdims=True) == 1
    assert np.all(error <= float16 + np.where(owns & one_owner, 0, larger / 4))
    assert np.mean(error <= larger / 8 + float16) > 0.99


@pytest.mark.parametrize("kind", BLOCK_BYTES)
def test_unpacked_blocks_equal_the_gguf_package(kind: str) -> None:
    part, expected = in_blocks(kind)
    assert np.array_equal(unpack(part.read(), kind).dequantise().reshape(expected.shape), expected)


@pytest.mark.parametrize(("form", "share"), [("int8", 0.0055), ("int4", 0.0745)])
def test_floats_are_rounded_by_the_stated_error(form: str, share: float) -> None:
    values = normal(256, 256)
    weight = read(floats(values), form)
    assert int(weight.q.max()) == 2**weight.bits - 1
    assert relative_rms(weight.dequantise(), values) < share


def test_eight_bits_round_to_the_nearest_step() -> None:
    values = normal(16, 128)
    weight = read(floats(values), "int8")
    # Beyond half a step: the ends of the range, moved by float16.
    bound = weight.scale.float().repeat_interleave(32, 1) * 0.5 + float(np.abs(values).max()) * 2.0**-10
    assert torch.all((weight.dequantise() - torch.from_numpy(values)).abs() <= bound)


def test_four_bits_err_less_than_steps_from_lowest_to_highest() -> None:
    values = normal(64, 256).reshape(-1, 32)
    low, high = values.min(1, keepdims=True), values.max(1, keepdims=True)
    step = (high - low) / 15
    plain = np.rint((values - low) / step) * step + low
    assert relative_rms(read(floats(values), "int4").dequantise(), values) < 0.96 * relative_rms(
        torch.from_numpy(plain), values
    )


@pytest.mark.parametrize(("form", "lowest", "highest", "middle"), [("int8", -127, 127, 0), ("int4", 0, 15, -2)])
def test_values_on_a_grid_are_found_again(form: str, lowest: int, highest: int, middle: float) -> None:
    q = np.random.default_rng(0).integers(lowest, highest + 1, (8, 64)).astype(np.float32)
    q[:, ::32], q[:, 1::32] = lowest, highest
    values = q * np.float32(0.25) + np.float32(middle)
    assert torch.equal(read(floats(values), form).dequantise(), torch.from_numpy(values))


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("value", [0.0, -0.5, 1e-30, -1e-42])
def test_equal_values_stay_equal(form: str, value: float) -> None:
    values = np.full((2, 64), value, np.float32)
    expected = torch.from_numpy(values).half().float()  # what is too small for float16 vanishes
    rtol = 2**-11 if form == "int8" else 0  # a step of 8 bits is rounded to float16, and the value is 127 steps
    torch.testing.assert_close(read(floats(values), form).dequantise(), expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_tiny_values_are_near_zero_and_numbers(form: str) -> None:
    values = normal(4, 64) * 1e-7
    assert read(floats(values), form).dequantise().abs().max() < 1e-7


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("kind", [*FLOAT_KINDS, "BF16", "Q8_0", "IQ4_NL"])
def test_every_stored_type_can_be_rounded(form: str, kind: str) -> None:
    values = normal(8, 64)
    if kind in FLOAT_KINDS:
        part, expected = stored(values.astype(FLOAT_KINDS[kind]), kind, 8, 64), values
    elif kind == "BF16":
        halves = torch.from_numpy(values).bfloat16()
        part, expected = stored(halves.view(torch.uint8).numpy(), kind, 8, 64), halves.float().numpy()
    elif kind == "Q8_0":
        part, expected = in_blocks(kind, 8, 64)
    else:
        data = np.random.default_rng(0).integers(0, 20, (8, 36), dtype=np.uint8)
        part, expected = stored(data, kind, 8, 64), gguf.dequantize(data, Kind[kind])
    assert relative_rms(read(part, form).dequantise(), expected) < (0.01 if form == "int8" else 0.12)


def test_parts_lie_one_below_the_other_and_four_bits_beside_eight_count_as_eight() -> None:
    parts = [in_blocks("Q4_1", 5, 256, 1), in_blocks("Q8_0", 3, 256, 2), in_blocks("Q4_K", 2, 256, 3)]
    values = normal(4, 256, 4)
    weight = read_quantised([*(part for part, _ in parts), floats(values)], ["Q4_1", "Q8_0", "Q4_K", "int8"])
    assert weight.bits == 8
    assert weight.q.shape == (14, 256)
    assert weight.scale.shape == weight.minimum.shape == (14, 8)
    got = weight.dequantise()
    assert torch.equal(got[:8], torch.from_numpy(np.concatenate([parts[0][1], parts[1][1]])))
    assert relative_rms(got[8:10], parts[2][1]) < 5e-4
    assert relative_rms(got[10:], values) < 0.0055


@pytest.mark.parametrize("form", ["Q8_0", "int8", "int4"])
def test_tensors_of_many_chunks_equal_their_rows_alone(form: str) -> None:
    columns = 1024
    rows = 2 * ELEMENTS_AT_ONCE // columns + 3
    part = in_blocks("Q8_0", rows, columns)[0] if form == "Q8_0" else floats(normal(rows, columns))
    whole = read(part, form)
    per_row = part.read().size // rows
    for row in (0, ELEMENTS_AT_ONCE // columns, rows - 1):
        alone = read(stored(part.read()[row * per_row :][:per_row], part.dtype, 1, columns), form)
        assert torch.equal(whole.dequantise()[row : row + 1], alone.dequantise())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e6])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_what_float16_cannot_hold_is_refused_by_name(form: str, value: float) -> None:
    values = normal(3, 64)
    values[1, 40] = value
    with pytest.raises(CheckpointError, match=r"f\.gguf: tensor blk\.0\.t: .*--quantization none"):
        read(floats(values), form)


def test_a_minimum_beyond_float16_is_refused() -> None:
    data = gguf.quantize(normal(2, 32), Kind.Q8_0)
    data[:, :2] = np.float16(600).reshape(1).view(np.uint8)  # times -128
    with pytest.raises(CheckpointError, match="too large to be quantised"):
        read(stored(data, "Q8_0", 2, 32), "Q8_0")
