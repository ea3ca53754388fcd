"""What the core process takes of the machine's cores."""

import asyncio
import os

import psutil
import pytest

from configs.sampling import SamplingParams
from configs.settings import EngineConfig
from engine.async_engine import AsyncEngine
from tests.engine.tiny_models import write_tiny


@pytest.fixture
def config(tmp_path):
    write_tiny(tmp_path)
    return EngineConfig(model=str(tmp_path), kv_cache_tokens=4096)


async def generate(engine):
    prompt = await engine.encode("Hello there")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return [output async for output in engine.generate(prompt, params, request_id="r")]


async def test_a_core_process_without_work_uses_no_cpu(config):
    engine = await AsyncEngine.start(config)
    try:
        await generate(engine)
        await asyncio.sleep(0.1)  # threads may spin for a moment after the last step
        process = psutil.Process(engine._supervisor.client.pid)
        before = process.cpu_times()
        await asyncio.sleep(2)
        after = process.cpu_times()
    finally:
        await engine.shutdown()
    assert after.user + after.system - before.user - before.system < 0.04  # seconds: 2 %


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
async def test_on_one_core_it_computes_with_one_thread(config):
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    try:
        engine = await AsyncEngine.start(config)
    finally:
        os.sched_setaffinity(0, usable)
    try:
        assert engine.info.num_threads == 1
        assert len(await generate(engine)) > 0
    finally:
        await engine.shutdown()
