"""engine/bench: the quality of quantised weights, kernels against ceilings, and the steps both run."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from configs.errors import UsageError
from configs.settings import EngineConfig
from engine.bench import ceilings, kernels, quality
from engine.bench.ceilings import Ceilings
from engine.bench.steps import Steps
from engine.checkpoints import open_checkpoint
from engine.kernels.cpu.build import KernelsUnavailable, load_library
from engine.loading import load_model
from engine.text.tokenizer import load_tokenizer
from tests.engine.paged_runs import prefill
from tests.engine.tiny_models import write_tiny

TEXT = "Anyone who keeps the ability to see beauty never grows old. " * 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Any, Any]:
    """A folder and the model that was written to it."""
    folder = tmp_path_factory.mktemp("tiny")
    return folder, write_tiny(folder)


@pytest.fixture
def compiled(monkeypatch) -> None:
    try:
        load_library()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    monkeypatch.setattr(ceilings, "READ_BYTES", 2**20)
    monkeypatch.setattr(ceilings, "SECONDS", 0.001)


def config_for(folder, **settings) -> EngineConfig:
    return EngineConfig(model=str(folder), num_threads=torch.get_num_threads(), **settings)


def loaded(folder, **settings):
    return load_model(config_for(folder, **settings), open_checkpoint(folder))


@torch.inference_mode()
def test_steps_equal_paged_runs(tiny):
    model = loaded(tiny[0], dtype="float32", attention_backend="torch_reference")
    model.backend.allocate(1 + 2 * 3)
    token_ids = torch.randint(272, (40,), generator=torch.Generator().manual_seed(0))
    expected = prefill(model.decoder, token_ids.tolist())

    chunk = Steps(model, num_seqs=2, seq_len=39, query_len=39)
    chunk.forward(token_ids[:39].repeat(2), chunk.last_rows)
    last = Steps(model, num_seqs=2, seq_len=40, query_len=1)
    logits = model.decoder.compute_logits(last.forward(token_ids[39:].repeat(2), last.last_rows))
    torch.testing.assert_close(logits, expected[-1:].expand(2, -1), rtol=0, atol=1e-4)


def test_a_rounded_cache_is_compared_with_an_exact_one(tiny):
    report = quality.measure(config_for(tiny[0], dtype="float32", kv_cache_dtype="int8"), text=TEXT, window=64)
    exact = quality.measure(config_for(tiny[0], dtype="float32"), text=TEXT, window=64)
    assert report["perplexity_float32"] == exact["perplexity_float32"]
    assert 0 < report["kl_divergence"] < 0.01


def test_float32_equals_itself_and_transformers(tiny):
    folder, oracle = tiny
    report = quality.measure(config_for(folder, dtype="float32"), text=TEXT, window=64)
    assert report["kl_divergence"] == 0
    assert report["same_likeliest"] == 1
    assert report["perplexity"] == report["perplexity_float32"]

    ids = torch.tensor(load_tokenizer(open_checkpoint(folder)).encode(TEXT, True))
    with torch.no_grad():
        losses = [
            F.cross_entropy(oracle(piece[None]).logits[0, :-1].double(), piece[1:], reduction="none")
            for piece in ids.split(64)
            if len(piece) > 1
        ]
    assert report["positions"] == sum(map(len, losses))
    assert report["perplexity"] == pytest.approx(torch.cat(losses).mean().exp().item(), rel=1e-4)


def test_fewer_bits_cost_more(tiny):
    divergence = {
        quantization: quality.measure(
            config_for(tiny[0], dtype="float32", quantization=quantization), text=TEXT, window=64
        )["kl_divergence"]
        for quantization in ("int8", "int4")
    }
    assert 0 < divergence["int8"] < divergence["int4"]


def test_a_text_has_two_tokens(tiny):
    with pytest.raises(UsageError, match="two tokens"):
        quality.measure(config_for(tiny[0]), text="", window=64)


def test_the_slower_of_memory_and_products_limits():
    limits = Ceilings(bytes_read=10.0, operations={"float32": 100.0})
    assert limits.seconds(10, 10, "float32") == (1.0, "memory")
    assert limits.seconds(10, 1000, "float32") == (10.0, "float32 products")


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_every_kernel_of_a_step_is_measured(tiny, compiled, quantization):
    config = config_for(tiny[0], dtype="bfloat16", quantization=quantization)
    report = kernels.measure(config, rows=[1, 3], context=20, repeats=2)
    assert [step["rows"] for step in report["steps"]] == [1, 3, 20]
    for step in report["steps"]:
        assert tuple(kernel["kernel"] for kernel in step["kernels"]) == kernels.KERNELS
        # a tiny model may round to nothing of a limit
        assert all(kernel["ms"] >= 0 and kernel["percent_of_limit"] >= 0 for kernel in step["kernels"])
        shares = sum(kernel["percent_of_step"] for kernel in step["kernels"])
        assert 0 < shares <= 100.5  # rounded; the rest lies between the kernels
    assert report["ceilings"].keys() == {
        "gigabytes_read_per_second",
        *(f"gflops_{kind}" for kind in ("float32", "bfloat16", "int8")),
    }


def test_the_work_of_a_step(tiny, compiled):
    work = kernels.work_of_step(loaded(tiny[0], dtype="float32"), num_seqs=2, context=10, query_len=1)
    hidden, mlp, heads, kv_heads, head_dim, layers, vocab = 64, 96, 4, 2, 16, 3, 272
    assert work["attention"].num_bytes == 2 * layers * 10 * 2 * kv_heads * head_dim * 4
    assert work["attention"].operations == 2 * layers * 10 * 4 * heads * head_dim
    rows_of_weights = (heads + 2 * kv_heads) * head_dim
    assert work["attention_input"].num_bytes == layers * rows_of_weights * hidden * 4
    assert work["attention_input"].operations == 2 * 2 * layers * rows_of_weights * hidden
    assert work["attention_output"].num_bytes == layers * (hidden * hidden + 3 * hidden * mlp) * 4
    assert work["logits"].num_bytes == vocab * hidden * 4
    rounded = loaded(tiny[0], dtype="float32", kv_cache_dtype="int8")
    work = kernels.work_of_step(rounded, num_seqs=2, context=10, query_len=1)
    assert work["attention"].num_bytes == 2 * layers * 10 * 2 * kv_heads * (head_dim + 4)


def test_a_window_and_a_prefill_shorten_the_keys(tmp_path, compiled):
    write_tiny(tmp_path, "mistral", sliding_window=4)
    config = open_checkpoint(tmp_path).config
    assert kernels._keys(config, 0, context=10, query_len=1) == (4, 4)
    assert kernels._keys(config, 0, context=10, query_len=10) == (10, 1 + 2 + 3 + 4 * 7)


def test_without_a_compiler_kernels_say_so(tiny, monkeypatch):
    def unavailable():
        raise KernelsUnavailable("no C++ compiler")

    monkeypatch.setattr(ceilings, "load_library", unavailable)
    with pytest.raises(UsageError, match="no C\\+\\+ compiler"):
        kernels.measure(config_for(tiny[0]), rows=[1], context=8, repeats=1)


def test_models_that_run_elsewhere_are_refused(tiny, compiled):
    config = config_for(tiny[0], attention_backend="torch_reference")
    with pytest.raises(UsageError, match="does not run on the C\\+\\+ kernels"):
        kernels.measure(config, rows=[1], context=8, repeats=1)
