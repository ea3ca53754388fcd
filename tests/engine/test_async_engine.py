"""The engine in its own process, as the server uses it."""

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio

from configs.errors import ContextLengthExceeded, EngineDead, InvalidRequest, RequestFailed, UsageError
from configs.sampling import SamplingParams
from configs.settings import EngineConfig
from engine import core_process
from engine.async_engine import AsyncEngine
from engine.core_client import _MESSAGES_AT_ONCE
from engine.messages import TokenOutput
from engine.observer import Observer
from engine.output_processor import OutputProcessor
from tests.engine.tiny_models import write_tiny

ROOT = Path(__file__).parents[2]
SETTINGS = {"dtype": "float32", "attention_backend": "torch_reference", "kv_cache_tokens": 4096, "num_threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def config(folder):
    return EngineConfig(model=str(folder), **SETTINGS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(config):
    engine = await AsyncEngine.start(config)
    yield engine
    await engine.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def mortal_engine(config):
    """One of its own, for tests after which it is dead."""
    engine = await AsyncEngine.start(config)
    yield engine
    await engine.shutdown()


async def collect(engine, prompt, params, request_id="r"):
    return [output async for output in engine.generate(prompt, params, request_id=request_id)]


async def test_start_generate_shutdown(mortal_engine):
    assert mortal_engine.info.architecture == "LlamaForCausalLM"
    assert list(mortal_engine.info.timings)[:1] == ["imports"]
    prompt = await mortal_engine.encode("Hello there")
    outputs = await collect(mortal_engine, prompt, GREEDY)
    assert [output.finish_reason for output in outputs][-1] == "length"
    token_ids = [token for output in outputs for token in output.token_ids]
    assert outputs[-1].num_output_tokens == len(token_ids) == 12
    assert outputs[-1].num_prompt_tokens == 11
    assert "".join(output.text for output in outputs) == mortal_engine.tokenizer.decode(token_ids)
    assert not mortal_engine.is_dead
    pid = mortal_engine._supervisor.client.pid
    await mortal_engine.shutdown()
    assert mortal_engine.is_dead
    assert not psutil.pid_exists(pid)


async def test_long_texts_and_chats_are_encoded_as_short_ones(engine):
    text = "some words " * 400
    assert await engine.encode(text) == engine.tokenizer.encode(text)
    ids = (await engine.render_chat([{"role": "user", "content": "Hi"}])).token_ids
    assert engine.tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_many_at_once_equal_one_by_one(engine):
    prompts = [list(range(3 + index, 40 + index)) for index in range(12)]
    alone = [await collect(engine, prompt, GREEDY) for prompt in prompts]
    together = await asyncio.gather(
        *(collect(engine, prompt, GREEDY, str(index)) for index, prompt in enumerate(prompts))
    )
    for one, other in zip(alone, together, strict=True):
        assert "".join(o.text for o in one) == "".join(o.text for o in other)


async def test_a_slow_reader_gets_merged_outputs_and_the_same_text(engine):
    fast = await collect(engine, [5, 6, 7], SamplingParams(temperature=0, max_tokens=60, logprobs=1))
    slow = []
    async for output in engine.generate(
        [5, 6, 7], SamplingParams(temperature=0, max_tokens=60, logprobs=1), request_id="slow"
    ):
        slow.append(output)
        await asyncio.sleep(0.1)
    assert len(slow) < 30
    for field in ("token_ids", "logprobs"):
        one, other = ([item for output in part for item in getattr(output, field)] for part in (slow, fast))
        assert one == other
    assert "".join(output.text for output in slow) == "".join(output.text for output in fast)


async def test_choices_share_a_stream_and_equal_themselves_alone(engine):
    prompts = [[5, 6, 7], [70, 80, 90], list(range(40))]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (40, 60, 50)]
    alone = [await collect(engine, *choice) for choice in zip(prompts, params, strict=True)]
    texts, reasons, largest = ["", "", ""], [[], [], []], 0
    async for batch in engine.generate_many(list(zip(prompts, params, strict=True)), request_id="three"):
        assert len({index for index, _ in batch}) == len(batch)
        largest = max(largest, len(batch))
        for index, output in batch:
            texts[index] += output.text
            reasons[index].append(output.finish_reason)
    assert texts == ["".join(output.text for output in outputs) for outputs in alone]
    assert all(one[-1] == "length" and set(one[:-1]) <= {None} for one in reasons)
    assert largest == 3, "what a step brings comes together"
    await nothing_runs(engine)


async def test_closing_the_stream_aborts_all_choices(engine):
    batches = engine.generate_many([([5, 6, 7], ENDLESS), ([8], GREEDY), ([9], ENDLESS)], request_id="closed")
    async for batch in batches:
        if any(output.finish_reason for _, output in batch):
            break
    await batches.aclose()
    await nothing_runs(engine)


async def test_one_choice_that_fails_aborts_the_others(engine):
    with pytest.raises(ContextLengthExceeded, match="2000"):
        async for _ in engine.generate_many([([5, 6], ENDLESS), ([5] * 2000, GREEDY)], request_id="two"):
            pass
    await nothing_runs(engine)


async def test_a_core_that_is_faster_than_its_readers_does_not_starve_them(config):
    engine = await AsyncEngine.start(config, core=("engine.bench.stub_core", "0"))
    prompt = [5, 6, 7]
    try:
        params = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
        readers = [collect(engine, prompt, params, str(number)) for number in range(4)]
        for outputs in await asyncio.wait_for(asyncio.gather(*readers), 20):
            assert [token_id for output in outputs for token_id in output.token_ids] == prompt * 1000
            # a turn of the loop takes messages once for the socket and once behind each request that was just sent
            assert max(len(output.token_ids) for output in outputs) <= (2 + len(readers)) * _MESSAGES_AT_ONCE
    finally:
        await engine.shutdown()


async def test_the_core_without_a_model_answers_every_message(config):
    engine = await AsyncEngine.start(config, core=("engine.bench.stub_core", "1"))
    try:
        async for _ in engine.generate([5, 6, 7], ENDLESS, request_id="left"):
            break
        assert (await asyncio.wait_for(engine.snapshot(), 10)).requests == []
        async with asyncio.timeout(10):
            while engine._leaving:
                await asyncio.sleep(0.01)
    finally:
        await engine.shutdown()


async def test_others_get_their_turn_between_the_choices_of_one_request(config):
    turns, begun, ended = 0, Counter(), Counter()

    class Noting(Observer):
        def began(self, request):
            begun[turns] += 1

        def ended(self, *_):
            ended[turns] += 1

    async def count_turns():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    engine = await AsyncEngine.start(config, core=("engine.bench.stub_core", "1"))
    engine.observer = Noting()
    counting = asyncio.create_task(count_turns())
    await asyncio.sleep(0)
    try:
        async for _ in engine.generate_many([([5, 6, 7], GREEDY)] * 1024, request_id="many"):
            pass
    finally:
        counting.cancel()
        await engine.shutdown()
    for counts in (begun, ended):
        assert counts.total() == 1024
        assert max(counts.values()) <= 64


async def test_a_deadline_while_the_ends_of_many_choices_are_read(config):
    engine = await AsyncEngine.start(config, core=("engine.bench.stub_core", "100"))
    deadline = time.monotonic() + 1

    class Late(Observer):
        def ended(self, *args):
            time.sleep(max(0.0, deadline + 0.6 - time.monotonic()))

    engine.observer = Late()
    choices = [([5], ENDLESS), *[([5], SamplingParams(max_tokens=1))] * 127]
    try:
        batches = engine.generate_many(choices, request_id="r", deadline=deadline)
        reasons = Counter([output.finish_reason async for batch in batches for _, output in batch])
    finally:
        await engine.shutdown()
    assert (reasons["length"], reasons["timeout"]) == (127, 1)


async def test_a_stop_string_ends_the_request_in_the_core_too(engine):
    free = await collect(engine, [70, 80, 90], SamplingParams(temperature=0, max_tokens=40))
    text = "".join(output.text for output in free)
    stop = text[20:22]
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, stop=(stop,))
    outputs = await collect(engine, [70, 80, 90], params)
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)
    assert "".join(output.text for output in outputs) == text[: text.index(stop)]
    await nothing_runs(engine)


async def test_closing_the_generator_aborts(engine):
    generator = engine.generate([5, 6, 7], ENDLESS, request_id="closed")
    async for _ in generator:
        break
    await generator.aclose()
    await nothing_runs(engine)


async def test_cancelling_the_reader_aborts(engine):
    reader = asyncio.create_task(collect(engine, [5, 6, 7], ENDLESS))
    await asyncio.sleep(0.2)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await nothing_runs(engine)


@pytest.mark.parametrize("ends", ["left", "stop string"])
async def test_an_id_that_is_used_again_at_once_gets_nothing_of_the_request_before(engine, ends):
    alone = await collect(engine, [70, 80, 90], GREEDY)
    params = ENDLESS
    if ends == "stop string":
        text = "".join([output.text for output in await collect(engine, [5, 6, 7], GREEDY)])
        params = msgspec.structs.replace(ENDLESS, stop=(text[:1],))
    generator = engine.generate([5, 6, 7], params, request_id="same")
    reading = asyncio.create_task(anext(generator))
    while not engine._mailboxes:
        await asyncio.sleep(0)
    time.sleep(0.1)  # the core goes on meanwhile, and nobody takes what it sends
    await reading
    await generator.aclose()
    again = await collect(engine, [70, 80, 90], GREEDY, "same")
    one, other = ([token_id for output in outputs for token_id in output.token_ids] for outputs in (again, alone))
    assert one == other
    await nothing_runs(engine)
    assert engine._leaving == set()


async def nothing_runs(engine):
    """The core becomes idle: it uses no more processor time."""
    assert engine._mailboxes == {}
    core = psutil.Process(engine._supervisor.client.pid)
    await asyncio.sleep(0.2)
    before = core.cpu_times()
    await asyncio.sleep(0.3)
    after = core.cpu_times()
    assert (after.user + after.system) - (before.user + before.system) < 0.05
    assert (await collect(engine, [5, 6, 7], GREEDY, "next"))[-1].finish_reason == "length"


async def test_what_cannot_be_answered_is_refused(engine):
    with pytest.raises(InvalidRequest, match="empty"):
        engine.validate([], GREEDY)
    with pytest.raises(InvalidRequest, match="272"):
        engine.validate([5, 272], GREEDY)
    with pytest.raises(InvalidRequest, match="between 0 and 271") as error:
        engine.validate([5], SamplingParams(logit_bias={99999999: 5.0}))
    assert error.value.param == "logit_bias"
    with pytest.raises(ContextLengthExceeded, match=r"(?s)1020.*12.*1024"):
        engine.validate([5] * 1020, GREEDY)
    engine.validate([5] * 1023, ENDLESS)
    with pytest.raises(ContextLengthExceeded, match="1024"):
        engine.validate([5] * 1024, ENDLESS)
    # what slips through is refused by the core
    with pytest.raises(ContextLengthExceeded, match="2000"):
        await collect(engine, [5] * 2000, GREEDY)


async def test_a_request_id_in_use_is_refused(engine):
    generator = engine.generate([5, 6, 7], ENDLESS, request_id="same")
    await anext(generator)
    with pytest.raises(InvalidRequest, match="in use"):
        await collect(engine, [5], GREEDY, "same")
    await generator.aclose()


async def test_the_death_of_the_core_ends_every_stream_at_once(mortal_engine):
    readers = [asyncio.create_task(collect(mortal_engine, [5 + index, 6], ENDLESS, str(index))) for index in range(4)]
    await asyncio.sleep(0.2)
    os.kill(mortal_engine._supervisor.client.pid, signal.SIGKILL)
    killed = time.monotonic()
    results = await asyncio.gather(*readers, return_exceptions=True)
    assert time.monotonic() - killed < 1
    assert all(isinstance(result, EngineDead) and "signal 9" in result.message for result in results)
    assert mortal_engine.is_dead
    with pytest.raises(EngineDead):
        await collect(mortal_engine, [5], GREEDY)


async def test_an_error_in_the_loop_ends_the_process(mortal_engine):
    reader = asyncio.create_task(collect(mortal_engine, [5, 6], ENDLESS))
    await asyncio.sleep(0.1)
    mortal_engine._supervisor.client._socket.send(b"no message")
    with pytest.raises(EngineDead, match="exit status 1"):
        await reader


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signals_to_the_group_leave_the_core_to_its_parent(engine, number):
    reader = asyncio.create_task(collect(engine, [5, 6], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)))
    await asyncio.sleep(0.05)
    os.kill(engine._supervisor.client.pid, number)
    assert (await reader)[-1].finish_reason == "length"
    assert (await collect(engine, [5, 6], GREEDY))[-1].finish_reason == "length"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signals_to_the_group_leave_the_encoding_of_a_very_long_text(engine, number):
    others = set(psutil.Process().children())
    encoding = asyncio.create_task(engine.encode("Hello, world. " * 200_000))
    while not (started := set(psutil.Process().children()) - others):
        await asyncio.sleep(0.01)
    [process] = started
    ignored = 0
    while not ignored >> (number - 1) & 1:
        await asyncio.sleep(0.01)
        ignored = int(re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())[1], 16)
    process.send_signal(number)
    assert len(await encoding) > 200_000


async def test_a_failed_start_is_one_line(folder, tmp_path):
    for settings, words in (
        ({"model": str(tmp_path / "nothing")}, "no such file"),
        ({"model": str(folder), "attention_backend": "nonsense"}, "nonsense"),
        ({"model": str(folder), "kv_cache_tokens": 3}, "one block"),
    ):
        with pytest.raises(UsageError, match=words) as error:
            await AsyncEngine.start(EngineConfig(**SETTINGS | settings))
        assert "\n" not in str(error.value)


async def test_what_the_machine_lacks_is_told_with_the_mend():
    import torch

    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(2**60, dtype=torch.uint8)
    for error in (of_torch.value, MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")):
        assert "out of memory while loading; take" in core_process._lack(error)
    full = OSError(errno.ENOSPC, "No space left on device", "/tmp/x")
    assert core_process._lack(full).startswith("cannot write /tmp/x: No space left on device; TMPDIR")
    for error in (OSError(errno.EIO, "Input/output error"), RuntimeError("a fault of ours"), ValueError()):
        assert core_process._lack(error) is None


async def test_generation_config_gives_the_defaults(tmp_path):
    from engine.input_processor import InputProcessor

    write_tiny(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.4, "top_k": 20, "top_p": null, "eos_token_id": 2}'
    )
    config = EngineConfig(model=str(tmp_path), **SETTINGS)
    assert InputProcessor(config).default_sampling == {"temperature": 0.4, "top_k": 20}
    assert InputProcessor(EngineConfig(model=str(tmp_path), generation_config="none")).default_sampling == {}


async def test_a_chat_template_file_replaces_the_checkpoints(folder, tmp_path):
    from engine.input_processor import InputProcessor

    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    inputs = InputProcessor(EngineConfig(model=str(folder), chat_template=str(template)))
    assert inputs.render([{"role": "user", "content": "Hi"}]) == "[Hi]"
    with pytest.raises(UsageError, match="chat_template"):
        InputProcessor(EngineConfig(model=str(folder), chat_template=str(tmp_path / "none")))


async def test_the_core_ends_with_its_parent(config):
    """A parent that is killed has no time to end its core."""
    script = (
        "import asyncio, sys\n"
        "from configs.settings import EngineConfig\n"
        "from engine.async_engine import AsyncEngine\n"
        "async def main():\n"
        f"    engine = await AsyncEngine.start(EngineConfig(model={config.model!r}, **{SETTINGS!r}))\n"
        "    print(engine._supervisor.client.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    for _ in range(50):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            break
        await asyncio.sleep(0.1)
    else:
        pytest.fail(f"the core {pid} outlives its parent")


async def test_the_api_process_imports_no_torch():
    script = (
        "import sys, engine.async_engine, engine.core_client, engine.text.tokenizer, engine.text.chat_template\n"
        "from octavo import SamplingParams\n"
        "print([name for name in ('torch', 'transformers', 'gguf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


async def test_a_request_that_the_core_gives_up_raises(engine):
    processor = OutputProcessor(engine.tokenizer, [1], GREEDY)
    with pytest.raises(RequestFailed, match="not a number"):
        processor.process(TokenOutput(request_id="r", finish_reason="error", error="not a number"))


async def test_a_chat_may_bring_its_template(engine):
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    chat = [{"role": "user", "content": "Hi"}]
    for _ in range(2):
        rendered = await engine.render_chat(chat, chat_template=template)
        assert rendered.text == "[Hi]"
        assert rendered.token_ids == await engine.encode("[Hi]", add_special_tokens=False)
    with pytest.raises(InvalidRequest, match="line 1") as caught:
        await engine.render_chat(chat, chat_template="{% for %}")
    assert caught.value.param == "chat_template"
    assert (await engine.render_chat(chat)).text.endswith("<|im_start|>assistant\n")
