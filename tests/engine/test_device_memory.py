"""What is decided from a GPU: type of number, defaults, size of the cache. No GPU is asked; torch.cuda is a fake."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from configs.errors import SettingsError, UsageError
from configs.settings import EngineConfig
from engine import loading, machine, memory_profile
from engine.attention.torch_reference import TorchReferenceAttention
from engine.checkpoints import open_checkpoint
from engine.decode_graphs import graph_sizes
from engine.device import compute_capability, device_name, resolved, select_device, select_dtype
from engine.kv_cache import MAX_TOKENS, plan_num_blocks
from engine.loading import KV_CACHE_DTYPES, load_model
from engine.memory_profile import GRAPH_BYTES, measured_free_bytes, run_largest_step
from tests.engine.tiny_models import VOCAB_SIZE, write_tiny

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return folder


@pytest.fixture
def gpu(monkeypatch):
    """A GPU by its capability and name."""
    card = SimpleNamespace(capability=(9, 0), name="NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card.name)
    return card


def test_a_gpu_is_named(gpu):
    assert select_device("auto") == GPU
    assert (device_name(GPU), device_name(CPU)) == ("cuda (NVIDIA H200)", "cpu")
    assert (compute_capability(GPU), compute_capability(CPU)) == ((9, 0), (0, 0))


@pytest.mark.parametrize(("cuda", "reason"), [(None, "built without CUDA"), ("13.0", "no usable GPU")])
def test_no_gpu_is_told_from_a_torch_without_cuda(monkeypatch, cuda, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(SettingsError, match=reason):
        select_device("cuda")


@pytest.mark.parametrize(
    ("capability", "name", "stored", "expected"),
    [
        ((9, 0), "auto", "bfloat16", torch.bfloat16),
        ((8, 0), "bfloat16", "float32", torch.bfloat16),
        ((7, 5), "auto", "bfloat16", torch.float16),
        ((7, 5), "auto", "float32", torch.float32),
        ((7, 5), "auto", "float16", torch.float16),
        ((7, 5), "float16", "bfloat16", torch.float16),
        ((7, 5), "float32", "bfloat16", torch.float32),
    ],
)
def test_type_of_number_on_a_gpu(gpu, capability, name, stored, expected):
    gpu.capability = capability
    dtype, notes = select_dtype(name, stored, GPU)
    assert dtype == expected
    assert bool(notes) == (name == "auto" and str(expected) != f"torch.{stored}")


def test_bfloat16_is_refused_where_a_gpu_has_none(gpu):
    gpu.capability, gpu.name = (7, 5), "Tesla T4"
    with pytest.raises(SettingsError, match=r"Tesla T4.*float16 or float32"):
        select_dtype("bfloat16", "bfloat16", GPU)


@pytest.mark.parametrize(
    ("device", "expected"), [(CPU, ("cpu", 16, 0.25, False, False)), (GPU, ("cuda", 64, 0.9, True, True))]
)
def test_the_device_decides_what_was_left_open(device, expected):
    names = ("device", "block_size", "kv_cache_memory_fraction", "async_scheduling", "cuda_graphs")
    config = resolved(EngineConfig(), device)
    assert tuple(getattr(config, name) for name in names) == expected
    assert resolved(config, device) == config
    asked = {"block_size": 32, "kv_cache_memory_fraction": 0.5, "async_scheduling": not expected[3]}
    config = resolved(EngineConfig(**asked, cuda_graphs=False), device)
    assert {name: getattr(config, name) for name in asked} == asked
    assert config.cuda_graphs is False


def plan(device, free_bytes, **settings):
    config = resolved(EngineConfig(**settings), device)
    return plan_num_blocks(config, block_bytes=1_000_000, max_model_len=2**17, free_bytes=free_bytes)


def test_a_gpus_cache_takes_nine_tenths_and_knows_no_cap_but_the_largest_batch():
    assert plan(GPU, 100_000_000_000) == (90_001, [])  # 5.8 million tokens
    assert plan(GPU, 100_000_000_000, max_num_seqs=4)[0] == 4 * 2**17 // 64 + 1
    assert plan(CPU, 100_000_000_000_000)[0] == MAX_TOKENS // 16 + 1
    [note] = plan(GPU, 1_000_000_000)[1]
    assert "57600 tokens" in note


@pytest.mark.parametrize(
    ("settings", "mend"),
    [({}, "max_num_batched_tokens"), ({"kv_cache_tokens": 63}, "kv_cache_tokens"), ({"kv_cache_tokens": 6400}, "free")],
)
def test_a_gpu_without_room_is_refused_with_a_mend(settings, mend):
    with pytest.raises(SettingsError, match=mend):
        plan(GPU, 2_000_000 if settings else 999_999, **settings)


@pytest.mark.parametrize("name", sorted(KV_CACHE_DTYPES))
def test_types_of_the_cache(folder, name):
    config = EngineConfig(model=str(folder), device="cpu", attention_backend="torch_reference", kv_cache_dtype=name)
    spec = load_model(config, open_checkpoint(folder)).spec
    assert spec.cache_dtype == (KV_CACHE_DTYPES[name] or torch.float32)
    assert spec.has_scales == (name != "auto")
    assert spec.block_size == 16
    assert set(KV_CACHE_DTYPES) == {"auto", "int8", "fp8_e4m3", "fp8_e5m2"}


def test_weights_that_do_not_fit_are_refused_with_a_mend(folder, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loading, "load_decoder", fail)
    with pytest.raises(UsageError, match="the weights do not fit the memory of cpu; take"):
        load_model(EngineConfig(model=str(folder), device="cpu"), open_checkpoint(folder))


class SeesSteps(TorchReferenceAttention):
    def prepare(self, metadata):
        self.seen = metadata
        super().prepare(metadata)


@pytest.mark.parametrize(
    ("most_tokens", "most_seqs", "max_model_len", "num_tokens", "num_seqs"),
    [(50, 7, 1024, 50, 7), (50, 64, 1024, 50, 50), (50, 2, 9, 18, 2), (1, 1, 5, 1, 1)],
)
def test_the_largest_step(folder, monkeypatch, most_tokens, most_seqs, max_model_len, num_tokens, num_seqs):
    config = EngineConfig(
        model=str(folder), device="cpu", max_num_batched_tokens=most_tokens, max_num_seqs=most_seqs, dtype="float32"
    )
    monkeypatch.setattr(loading, "select_backend", lambda name, spec: (SeesSteps, []))
    model = load_model(config, open_checkpoint(folder))
    cache = model.backend.allocate(1)
    sampled = []
    choose = model.decoder.ops.choose_tokens
    monkeypatch.setattr(
        model.decoder.ops,
        "choose_tokens",
        lambda logits, choice: sampled.append(logits.shape) or choose(logits, choice),
    )
    run_largest_step(model, config, max_model_len)
    seen = model.backend.seen
    lengths = np.diff(seen.host_query_start_loc)
    assert (lengths.sum(), len(lengths)) == (num_tokens, num_seqs)
    assert 1 <= lengths.min() <= lengths.max() <= max_model_len
    assert lengths.tolist() == seen.host_seq_lens.tolist()
    assert sampled == [(num_seqs, VOCAB_SIZE)]
    assert not any(tensor.any() for tensor in (*cache.keys, *cache.values))


class Memory:
    """Of a GPU, as the driver and as torch count it."""

    def __init__(self, monkeypatch, free):
        self.free, self.cached, self.allocated, self.peak = free, 0, 0, 0
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free - self.cached, 2 * free))
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def empty_cache(self):
        self.cached = self.allocated

    def reset(self, device):
        self.peak = self.allocated

    def take_for_a_while(self, num_bytes):
        if num_bytes > self.free:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.cached = max(self.cached, num_bytes)
        self.peak = max(self.peak, self.allocated + num_bytes)


def gpu_model(captures_decode):
    spec = SimpleNamespace(device=GPU, block_size=64)
    backend = SimpleNamespace(captures_decode=captures_decode, allocate=lambda num_blocks: None, prepare=lambda _: None)
    return SimpleNamespace(spec=spec, backend=backend)


@pytest.fixture
def measure(monkeypatch):
    """Of a model whose largest step takes 10 GiB and whose decode step takes 1 GiB, with logits of 0.25 GiB."""

    def measure(free=100 * GIB, captures_decode=True, **settings):
        memory = Memory(monkeypatch, free)
        memory.cached = 5 * GIB  # left behind by loading
        logits = SimpleNamespace(nbytes=GIB // 4)
        monkeypatch.setattr(memory_profile, "run_largest_step", lambda *_: memory.take_for_a_while(10 * GIB))
        monkeypatch.setattr(memory_profile, "_logits", lambda *_: memory.take_for_a_while(GIB) or logits)
        real = memory_profile.GraphInputs
        monkeypatch.setattr(memory_profile, "GraphInputs", lambda *args: real(*args[:3], CPU))
        found = measured_free_bytes(gpu_model(captures_decode), resolved(EngineConfig(**settings), GPU), 4096)
        monkeypatch.setattr(memory_profile, "GraphInputs", real)
        assert memory.cached == 0
        return found

    return measure


def test_the_cache_gets_what_the_largest_step_and_the_graphs_leave(measure):
    graphs = GIB + GIB // 4 + len(graph_sizes(256)) * GRAPH_BYTES
    assert measure() == 90 * GIB - graphs
    assert measure(cuda_graphs=False) == measure(captures_decode=False) == 90 * GIB
    assert measure(max_num_seqs=1) == 90 * GIB - GIB - GIB // 4 - GRAPH_BYTES
    assert measure(free=11 * GIB) == 0


def test_a_step_that_does_not_fit_is_refused_with_a_mend(measure):
    with pytest.raises(SettingsError, match="lower max_num_batched_tokens or max_num_seqs"):
        measure(free=9 * GIB)


def test_on_a_cpu_the_machine_says_what_is_free(monkeypatch):
    monkeypatch.setattr(machine, "free_memory", lambda: 12345)
    model = SimpleNamespace(spec=SimpleNamespace(device=CPU))
    assert measured_free_bytes(model, resolved(EngineConfig(), CPU), 4096) == 12345
