"""Cores, memory, types of number and sizes of cache: what is decided from the machine."""

import os

import pytest
import torch

from configs.errors import SettingsError
from configs.settings import EngineConfig
from engine import machine
from engine.bundled import locate_model
from engine.device import resolved, select_device, select_dtype
from engine.kv_cache import MAX_TOKENS, plan_num_blocks

CPU = torch.device("cpu")


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu.max": "400000 100000"}, 4),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu__cpu.cfs_quota_us": "300000", "cpu__cpu.cfs_period_us": "100000"}, 3),
        ({"cpu__cpu.cfs_quota_us": "-1", "cpu__cpu.cfs_period_us": "100000"}, 64),
        ({"own": "0::/a/b", "cpu.max": "max 1", "a__cpu.max": "500000 100000", "a__b__cpu.max": "900000 100000"}, 5),
        ({"own": "7:pids:/z\n3:cpu,cpuacct:/a\n0::/", "cpu__a__cpu.cfs_quota_us": "700000"}, 7),
        ({"own": "1:cpu:/elsewhere/on/the/host", "cpu__cpu.cfs_quota_us": "300000"}, 3),
    ],
)
def test_cores_are_those_of_the_affinity_and_the_quotas(tmp_path, monkeypatch, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert machine.usable_cores(write(tmp_path, **files), tmp_path / "own") == cores


def test_affinity_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert machine.usable_cores(write(tmp_path, **{"cpu.max": "800000 100000"}), tmp_path / "own") == 2


def test_free_memory_is_cut_to_the_cgroups_limit(tmp_path):
    meminfo, own = tmp_path / "meminfo", tmp_path / "own"
    meminfo.write_text("MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 4000 kB\n")
    assert machine.free_memory(tmp_path, meminfo, own) == 4000 * 1024
    write(tmp_path, **{"memory.max": "3000000", "memory.current": "1000000"})
    assert machine.free_memory(tmp_path, meminfo, own) == 2_000_000
    write(tmp_path, **{"memory.stat": "anon 700000\ninactive_file 300000"})
    assert machine.free_memory(tmp_path, meminfo, own) == 2_300_000
    write(tmp_path, **{"memory.max": "max"})
    assert machine.free_memory(tmp_path, meminfo, own) == 4000 * 1024
    old = write(tmp_path / "v1", **{"memory__memory.limit_in_bytes": "700", "memory__memory.usage_in_bytes": "900"})
    assert machine.free_memory(old, meminfo, own) == 0
    write(tmp_path, own="0::/service", **{"service__memory.max": "1200", "service__memory.current": "200"})
    assert machine.free_memory(tmp_path, meminfo, own) == 1000


@pytest.mark.parametrize(
    ("name", "stored", "native", "expected"),
    [
        ("auto", "float32", True, torch.float32),
        ("auto", "bfloat16", True, torch.bfloat16),
        ("auto", "bfloat16", False, torch.float32),
        ("auto", "float16", True, torch.bfloat16),
        ("auto", "float16", False, torch.float32),
        ("bfloat16", "float32", False, torch.bfloat16),
        ("float32", "bfloat16", True, torch.float32),
    ],
)
def test_type_of_number_on_a_cpu(monkeypatch, name, stored, native, expected):
    monkeypatch.setattr(machine, "has_native_bfloat16", lambda: native)
    dtype, notes = select_dtype(name, stored, CPU)
    assert dtype == expected
    assert bool(notes) == (name == "auto" and str(expected) != f"torch.{stored}")


def test_float16_is_for_gpus():
    with pytest.raises(SettingsError, match="float16"):
        select_dtype("float16", "float16", CPU)
    assert select_dtype("auto", "float16", torch.device("cuda"))[0] == torch.float16


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device("auto") == CPU
    with pytest.raises(SettingsError, match="cuda"):
        select_device("cuda")


def plan(free_bytes=2**40, max_model_len=2048, block_bytes=1000, **settings):
    config = resolved(EngineConfig(model="any", **settings), CPU)
    return plan_num_blocks(config, block_bytes=block_bytes, max_model_len=max_model_len, free_bytes=free_bytes)


def test_blocks_of_the_cache():
    assert plan(max_num_seqs=1) == (129, [])
    assert plan()[0] == MAX_TOKENS // 16 + 1
    assert plan(free_bytes=1_000_000, kv_cache_memory_fraction=0.5)[0] == 501
    assert plan(kv_cache_tokens=4000) == (251, [])
    assert len(plan(kv_cache_tokens=2000)[1]) == 1
    with pytest.raises(SettingsError, match="one block"):
        plan(free_bytes=1000)
    with pytest.raises(SettingsError, match="free"):
        plan(free_bytes=1000, kv_cache_tokens=64)


def test_a_path_stays_as_it_is():
    assert str(locate_model("some/folder")) == "some/folder"
