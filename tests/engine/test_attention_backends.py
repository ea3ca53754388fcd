"""Every attention backend against attention written out; which one is chosen, why, and what a check at start finds.

Without a GPU: Triton's kernels, and xformers' for decodes, run in Triton's interpreter; FlexAttention as plain torch
operations; FlashAttention's operator, and xformers' for prompts, are written out here from their documentation.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import engine.attention as attention
from configs.errors import SettingsError
from engine.attention import BACKENDS, fa3, flex, select_backend, xformers_paged
from engine.attention.cpu import CPUAttention
from engine.attention.metadata import AttentionMetadata, AttentionSpec
from engine.attention.self_check import self_check
from engine.attention.torch_reference import TorchReferenceAttention
from engine.attention.triton_paged import TritonAttention
from tests.engine.attention_runs import dense, make_spec, run_steps, step_metadata

pytestmark = [  # of xformers' kernels
    pytest.mark.filterwarnings("ignore:warmup, rep, and use_cuda_graph:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated"),
    pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning"),
]
MIXED = [[20, 4, 0, 1], [1, 14, 18, 1], [1, 1, 1, 1]]
"""Prompts; decodes with a chunk and a new prompt; decodes."""
FA3_SCHEMA = """fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None,
Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,
Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None,
int? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None,
Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None,
Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False,
int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, float softcap=0.,
bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None,
int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"""


def attend_as_fa3(q: Tensor, k: Tensor, v: Tensor, *arguments: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys [blocks, block_size, G, d]; causality and window count from each sequence's bottom right corner."""
    parameters = torch.ops.flash_attn_3.fwd.default._schema.arguments[3:]
    given = {each.name: each.default_value for each in parameters}
    given |= {each.name: value for each, value in zip(parameters, arguments, strict=False)}
    out, starts, seq_lens = given["out"], given["cu_seqlens_q"].tolist(), given["seqused_k"].tolist()
    assert {x.dtype for x in (given["cu_seqlens_q"], given["seqused_k"], given["page_table"])} == {torch.int32}
    assert given["max_seqlen_q"] >= max(np.diff(starts))
    assert given["num_splits"] == 1
    assert all(length == 0 for length, query_len in zip(seq_lens, np.diff(starts), strict=True) if query_len == 1)
    left, right = given["window_size_left"], 0 if given["is_causal"] else given["window_size_right"]
    for row, (begin, end, length) in enumerate(zip(starts, starts[1:], seq_lens, strict=False)):
        if not length:
            out[begin:end] = 0
            continue
        keys, values = (x[given["page_table"][row].long()].flatten(0, 1)[:length] for x in (k, v))
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).float() for x in (keys, values))
        distance = torch.arange(length - (end - begin), length)[:, None] - torch.arange(length)
        hidden = ((left >= 0) & (distance > left)) | ((right >= 0) & (-distance > right))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * given["softmax_scale"]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out, torch.empty(0), torch.empty(0), torch.empty(0)


@pytest.fixture
def fa3_operator() -> Iterator[None]:
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(FA3_SCHEMA)
    library.impl("fwd", attend_as_fa3, "CPU")
    yield
    library._destroy()
    vars(torch.ops.flash_attn_3).pop("fwd", None)  # it would be remembered


def attend_by_mask(q: Tensor, k: Tensor, v: Tensor, mask: object, scale: float) -> Tensor:
    """[1, n, G, heads of a group, d] with a mask of xformers, which can draw itself."""
    bias = mask.materialize((1, 1, q.shape[1], k.shape[1]))[0, 0]
    scores = torch.einsum("qghd,kghd->ghqk", q[0].float(), k[0].float()) * scale + bias
    return torch.einsum("ghqk,kghd->qghd", scores.softmax(-1), v[0].float()).to(q.dtype)[None]


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch, fa3_operator: None) -> None:
    """What only a GPU has, in place of it."""
    monkeypatch.setattr(xformers_paged.fmha, "memory_efficient_attention_forward", attend_by_mask)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "_compiled", lambda _: flex.flex_attention)


FLOAT16 = {"dtype": torch.float16}
CASES = [
    (TorchReferenceAttention, {"softcap": 0.7}),
    (TorchReferenceAttention, {"kv_cache_dtype": torch.int8}),
    (TorchReferenceAttention, {"kv_cache_dtype": torch.float8_e4m3fn}),
    (TorchReferenceAttention, {"kv_cache_dtype": torch.float8_e5m2, "softcap": 0.7}),
    (TritonAttention, {"softcap": 0.7, "windows": (5,)}),
    (fa3.FA3Attention, FLOAT16),
    (xformers_paged.XFormersAttention, FLOAT16),
    (xformers_paged.XFormersAttention, FLOAT16 | {"num_heads": 2, "block_size": 48, "windows": (3,)}),
    (xformers_paged.XFormersAttention, FLOAT16 | {"head_dim": 128, "scale": 0.1, "block_size": 64}),
    (flex.FlexAttention, {"softcap": 0.7}),
    (flex.FlexAttention, {"num_heads": 2, "windows": (3,), "block_size": 32}),
]


@pytest.mark.parametrize(("backend", "changes"), CASES)
@pytest.mark.usefixtures("without_gpu")
def test_mixed_steps_equal_dense_attention(backend: type, changes: dict) -> None:
    spec = make_spec(**changes)
    unwritten = 100.0 if backend is flex.FlexAttention else torch.nan
    difference = run_steps(backend(spec), spec, MIXED, unwritten=unwritten)
    assert difference < (5e-3 if spec.dtype == torch.float16 else 1e-5)


@pytest.mark.parametrize("backend", [xformers_paged.XFormersAttention, flex.FlexAttention])
@pytest.mark.usefixtures("without_gpu")
def test_sequences_may_share_blocks(backend: type) -> None:
    spec = make_spec(dtype=torch.float16, windows=(None, 20))
    assert run_steps(backend(spec), spec, [[40, 3, 0], [1, 1, 2], [1, 1, 1]], shared=32, unwritten=100.0) < 5e-3


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize(("backend", "changes"), [*CASES, (CPUAttention, {}), (CPUAttention, {"windows": (7,)})])
@pytest.mark.usefixtures("without_gpu")
def test_a_sequence_reads_what_another_writes_in_the_same_step(backend: type, changes: dict, new: int) -> None:
    spec = make_spec(**changes)
    unwritten = 100.0 if backend is flex.FlexAttention else torch.nan
    steps = [[spec.block_size + 5, 3, new], [1, 1, 1]]
    difference = run_steps(backend(spec), spec, steps, shared=spec.block_size, unwritten=unwritten)
    assert difference < (5e-3 if spec.dtype == torch.float16 else 1e-5)


@pytest.mark.parametrize("num_seqs", [4, 3])
@pytest.mark.usefixtures("without_gpu")
def test_decodes_of_xformers_follow_metadata_that_changes_in_place(num_seqs: int) -> None:
    """What a CUDA graph does: `prepare` once, then `run` again and again."""
    spec = make_spec(dtype=torch.float16, windows=(None, 20))
    runner = xformers_paged.XFormersAttention(spec)
    assert runner.captures_decode
    cache = runner.allocate(1 + num_seqs * 4)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    blocks = 1 + torch.randperm(num_seqs * 4, generator=generator).view(num_seqs, 4)
    captured = step_metadata(spec, blocks, [slice(63, 64)] * num_seqs)
    runner.prepare(captured)
    new = torch.randn(3, num_seqs, 6, 16, generator=generator).half()
    q, k, v = new[0], new[1, :, :2], new[2, :, :2]
    runner.run(0, q, k, v)
    lengths = [7, 64, 33, 0][:num_seqs]
    replayed = step_metadata(spec, blocks.flip(0), [slice(max(0, n - 1), max(1, n)) for n in lengths])
    captured.seq_lens.copy_(torch.tensor(lengths))
    captured.block_table.zero_()
    captured.block_table.copy_(replayed.block_table)
    captured.slot_mapping.copy_(torch.where(torch.tensor(lengths) > 0, replayed.slot_mapping, -1))
    for layer in range(2):
        out = runner.run(layer, q, k, v)
        for row, length in enumerate(n for n in lengths if n):
            keys, values = (
                x[layer][blocks.flip(0)[row]].flatten(0, 1)[:length].float() for x in (cache.keys, cache.values)
            )
            torch.testing.assert_close(keys[-1], k[row].float())
            expected = dense(q[row : row + 1].float(), keys, values, spec.windows[layer], spec.scale)
            torch.testing.assert_close(out[row : row + 1].float(), expected, atol=5e-3, rtol=0)


def test_flex_traces_and_its_tiles_list_each_block_that_they_see_once() -> None:
    spec = make_spec()
    backend = flex.FlexAttention(spec)
    backend.allocate(12)
    blocks = torch.tensor([[4, 9, 2, 7, 1], [4, 9, 3, 5, 8], [6, 0, 0, 0, 0]])
    backend.prepare(step_metadata(spec, blocks, [slice(64, 65), slice(32, 77), slice(0, 3)]))
    tile = flex.TILE
    for mask in backend.masks.values():
        queries, slots = (torch.arange(n) for n in mask.seq_lengths)
        seen = mask.mask_mod(torch.tensor(0), torch.tensor(0), queries[:, None], slots[None])
        seen_blocks = seen.view(-1, tile, 12, spec.block_size).any(3).any(1)
        for row, count in enumerate(mask.kv_num_blocks[0, 0].tolist()):
            listed = mask.kv_indices[0, 0, row, :count].tolist()
            assert len(set(listed)) == len(listed)
            assert set(seen_blocks[row].nonzero().flatten().tolist()) <= set(listed)
    q, k = torch.randn(49, 6, 16), torch.randn(49, 2, 16)
    assert backend.run(1, q, k, k).isfinite().all()


CUDA = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "capability": (9, 0), "head_dim": 64}


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "needs_check", lambda spec: False)


@pytest.mark.parametrize(
    ("changes", "expected", "passed_over"),
    [
        ({}, "triton", ["fa3"]),
        ({"capability": (12, 0)}, "triton", ["fa3"]),
        ({"head_dim": 512}, "xformers", ["fa3", "triton"]),
        ({"head_dim": 512, "softcap": 50.0}, "torch_reference", ["fa3", "triton", "xformers"]),
        ({"capability": (7, 5)}, "torch_reference", ["fa3", "triton", "xformers"]),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_auto_takes_the_first_without_reasons(changes: dict, expected: str, passed_over: list[str]) -> None:
    backend, notes = select_backend("auto", make_spec(**CUDA | changes))
    assert backend.name == expected
    assert [note.split()[2] for note in notes] == passed_over


@pytest.mark.usefixtures("unchecked", "fa3_operator")
def test_auto_takes_flash_attention_where_it_is_installed() -> None:
    assert select_backend("auto", make_spec(**CUDA)) == (fa3.FA3Attention, [])


def test_a_cpu_hears_nothing_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "cpu", ("engine.attention.nowhere", "Nothing"))
    backend, notes = select_backend("auto", make_spec())
    assert backend is TorchReferenceAttention
    assert len(notes) == 1
    assert "cpu cannot be used: No module named" in notes[0]
    assert select_backend("torch_reference", make_spec()) == (TorchReferenceAttention, [])


REFUSED = [
    ("flash", {}, r"unknown; there are auto, cpu, .*torch_reference"),
    ("cpu", {}, "not on cuda"),
    ("fa3", {}, "No module named 'flash_attn_3'"),
    ("fa3", {"capability": (10, 0)}, r"compute capability 9\.0, not 10\.0"),
    ("fa3", {"dtype": torch.float32}, "float32"),
    ("fa3", {"softcap": 50.0}, "soft-cap"),
    ("fa3", {"kv_cache_dtype": torch.int8}, "no cache of torch.int8"),
    ("fa3", {"head_dim": 260}, "multiple of 8"),
    ("fa3", {"head_dim": 512}, "256"),
    ("xformers", {"capability": (7, 5)}, r"compute capability 8\.0, not 7\.5"),
    ("xformers", {"dtype": torch.float32}, "float32"),
    ("xformers", {"softcap": 50.0}, "soft-cap"),
    ("xformers", {"kv_cache_dtype": torch.float8_e5m2}, "no cache of torch.float8_e5m2"),
    ("xformers", {"head_dim": 80}, "head_dim 80 is none of 16, 32"),
    ("xformers", {"block_size": 8}, "block_size 8"),
    ("flex", {"device": torch.device("meta")}, "meta"),
    ("flex", {"kv_cache_dtype": torch.float8_e4m3fn}, "no cache of torch.float8_e4m3fn"),
    ("flex", {"block_size": 8}, "block_size 8"),
]


@pytest.mark.parametrize(("name", "changes", "reason"), REFUSED)
@pytest.mark.usefixtures("unchecked")
def test_a_named_backend_is_refused_with_its_reason(name: str, changes: dict, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        select_backend(name, make_spec(**CUDA | changes))


@pytest.mark.usefixtures("unchecked")
def test_xformers_is_refused_without_block_pointers_and_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_backend("xformers", make_spec(**CUDA))[0] is xformers_paged.XFormersAttention
    with monkeypatch.context() as patch:
        patch.setattr(xformers_paged.triton, "__version__", "3.10.0")
        with pytest.raises(SettingsError, match=r"triton 3\.10\.0, only below 3\.9"):
            select_backend("xformers", make_spec(**CUDA))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(SettingsError, match="needs a CUDA device, not cpu"):
        select_backend("xformers", make_spec(**FLOAT16))


@pytest.mark.parametrize(
    ("old", "new", "problems"),
    [
        ("", "", []),
        ("page_table", "block_table", ["its operator lacks the arguments page_table"]),
        ("k_new=None", "k_new", ["its operator asks for the arguments k_new"]),
        (
            "Tensor v,",
            "Tensor values,",
            [f"its operator {verb}" for verb in ("lacks the arguments v", "asks for the arguments values")],
        ),
    ],
)
def test_an_operator_of_flash_attention_is_read_before_it_is_called(old: str, new: str, problems: list[str]) -> None:
    schema = "flash_attn_3::" + FA3_SCHEMA.replace("\n", " ").replace(old, new, 1)
    assert fa3.schema_problems(torch._C.parse_schema(schema)) == problems


class WideWindow(TorchReferenceAttention):
    name = "wide_window"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(replace(spec, windows=tuple(window and window + 1 for window in spec.windows)))


class NoSoftCap(TorchReferenceAttention):
    name = "no_soft_cap"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(replace(spec, softcap=0.0))


class LastBlockOnly(TorchReferenceAttention):
    """A table of blocks that is read wrongly where a sequence decodes behind more than one block."""

    name = "last_block_only"

    def prepare(self, metadata: AttentionMetadata) -> None:
        if metadata.max_query_len == 1:
            metadata = replace(metadata, block_table=metadata.block_table.sort().values)
        super().prepare(metadata)


class NotANumber(TorchReferenceAttention):
    name = "not_a_number"

    def forward(self, layer: int, q: Tensor) -> Tensor:
        return super().forward(layer, q).index_fill(0, torch.tensor([0]), torch.nan)


class LosesLastToken(TorchReferenceAttention):
    name = "loses_last_token"

    def write_kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.stored, self.slots = self.stored[:-1], self.slots[:-1]
        super().write_kv(layer, k, v)


class DoesNotCompile(TorchReferenceAttention):
    name = "does_not_compile"

    def forward(self, layer: int, q: Tensor) -> Tensor:
        raise RuntimeError("ptxas: exit 255\nwith much text behind it")


BROKEN = [WideWindow, NoSoftCap, LastBlockOnly, NotANumber, LosesLastToken]
CHECKED = {"windows": (None, 4096), "softcap": 50.0, "num_heads": 2, "dtype": torch.bfloat16}


def test_a_check_passes_what_is_right_and_finds_what_is_not() -> None:
    spec = make_spec(**CHECKED)
    assert self_check(TorchReferenceAttention, spec) is None
    for backend in BROKEN:
        assert "its results are off by" in (self_check(backend, spec) or ""), backend
    assert self_check(DoesNotCompile, spec) == "RuntimeError: ptxas: exit 255"


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_check_covers_rounded_caches(cache_dtype: torch.dtype) -> None:
    spec = make_spec(kv_cache_dtype=cache_dtype)
    assert self_check(TorchReferenceAttention, spec) is None


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "needs_check", lambda spec: True)
    monkeypatch.setitem(BACKENDS, "broken", (__name__, "WideWindow"))
    monkeypatch.setitem(attention.AUTO, "cpu", ("broken", "torch_reference"))


@pytest.mark.usefixtures("checked")
def test_auto_passes_over_a_backend_that_fails_its_check(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        backend, notes = select_backend("auto", make_spec())
    assert backend is TorchReferenceAttention
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "wide_window fails its check on this machine: its results are off by" in caplog.text
    assert len(notes) == 1
    assert notes[0].startswith("attention backend broken cannot be used: it fails its check on this machine")


@pytest.mark.usefixtures("checked")
def test_a_named_backend_that_fails_its_check_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"broken cannot be used: it fails its check.* off by \d"):
        select_backend("broken", make_spec())


def test_only_gpus_are_checked() -> None:
    assert attention.needs_check(make_spec(**CUDA))
    assert not attention.needs_check(make_spec())
