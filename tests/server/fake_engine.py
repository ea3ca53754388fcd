"""A real `AsyncEngine` over `StubCore` in this process, with a byte tokenizer and text that the test scripts.

Token ids 0-255 are bytes, 256 begins and 257 ends a sequence. A request gets `script` byte by byte and ends at its end,
or before it as any request does. Its core steps only while somebody waits for an output, so that each is one token.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, decoders
from tokenizers.models import BPE

from configs.errors import EngineDead, InvalidRequest, QueueFull, RequestFailed, Unavailable
from configs.sampling import SamplingParams
from engine.admission import WaitingRoom
from engine.async_engine import AsyncEngine
from engine.bench.stub_core import READY, StubCore
from engine.input_processor import InputProcessor
from engine.messages import AbortRequests, AddRequest, Snapshot, StepStats, ToCore, TokenLogprobs, TokenOutput
from engine.outputs import OutputBatch
from engine.supervisor import EngineHealth, Status
from engine.text.tokenizer import Tokenizer
from scheduler.request import Request
from scheduler.timeline import Counters

BOS, EOS, VOCAB_SIZE = 256, 257, 258
STEP_SECONDS = 0.004
"""What the core says of each step."""


class ByteTokenizer(Tokenizer):
    def __init__(self, bos_token_id: int | None) -> None:
        ids = {f"<0x{byte:02X}>": byte for byte in range(256)}
        backend = tokenizers.Tokenizer(BPE(ids, [], byte_fallback=True))
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        backend.add_special_tokens([AddedToken(text, special=True) for text in ("<begin>", "<end>")])
        super().__init__(backend, {"bos_token": "<begin>", "eos_token": "<end>"})
        self.bos_token_id = bos_token_id
        self.eos_token_ids = (EOS,)
        self.special_texts: dict[str, int] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        prefix = [BOS] if add_special_tokens and text and self.bos_token_id is not None else []
        return prefix + list(text.encode(errors="replace"))

    def special_id(self, text: str) -> int | None:
        return self.special_texts.get(text)


class FakeInputs(InputProcessor):
    """Chats become their messages' contents."""

    chat_template: str | None = None
    own_tool_template: str | None = None

    def __init__(self, bos_token_id: int | None, default_sampling: dict[str, Any]) -> None:
        self.model = "fake"
        self.tokenizer = ByteTokenizer(bos_token_id)
        self.checkpoint = SimpleNamespace(config=SimpleNamespace(has_head=True))
        self.default_sampling = default_sampling
        self.default_pooling = "last"
        self.template_kwargs: dict[str, Any] = {}
        self.messages: list[dict[str, Any]] = []
        self._sequences_of, self._parts_of = self._encode_words, self._find_parts

    @property
    def tool_template(self) -> str | None:
        return self.own_tool_template or self.chat_template

    def render(self, messages: Sequence[dict[str, Any]], /, **template_kwargs: Any) -> str:
        self.messages, self.template_kwargs = list(messages), template_kwargs
        if any(message["role"] == "forbidden" for message in messages):
            raise InvalidRequest("the template knows no such role", param="messages")
        return "|".join(message["content"] for message in messages)

    def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        return [0xF8, *prefix.encode(), 0xF9, *suffix.encode(), 0xFA]


class ScriptedCore(StubCore):
    """Gives the script's bytes; the logprob of a prompt's token is minus its id."""

    def __init__(self, engine: "FakeEngine", max_model_len: int) -> None:
        ready = msgspec.structs.replace(
            READY,
            architecture="FakeForCausalLM",
            dtype="float32",
            kv_cache_dtype="float32",
            device="cpu",
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            kv_cache_tokens=max(4096, max_model_len),
            num_threads=1,
            timings={"load": 0.1},
        )
        super().__init__(ready, STEP_SECONDS)
        self._engine = engine
        self._scripts: dict[str, bytes] = {}

    def _add(self, message: AddRequest) -> None:
        super()._add(message)
        prompt = bytes(token_id for token_id in message.prompt_token_ids if token_id < 256).decode(errors="replace")
        self._scripts[message.request_id] = self._engine.script(prompt, message.sampling_params).encode()

    def next_token(self, request: Request) -> int:
        script, count = self._scripts[request.request_id], request.num_output_tokens
        return script[count] if count < len(script) else EOS

    def output(self, request: Request, now: float) -> TokenOutput:
        params, count = request.sampling_params, request.num_output_tokens
        if self.has_failed(request) and isinstance(error := self._engine.fail_after[1], RequestFailed | InvalidRequest):
            message, kind, param = error.message, type(error).__name__, error.param
            return TokenOutput(
                request_id=request.request_id, finish_reason="error", error=message, error_type=kind, error_param=param
            )
        output = super().output(request, now)
        changes: dict[str, Any] = {"num_cached_tokens": self._engine.num_cached_tokens}
        if output.new_token_ids == [EOS]:
            changes["finish_reason"] = "stop"  # there is nothing else to come, whatever the request asks for
        if output.new_token_ids and params.logprobs is not None:
            changes["logprobs"] = self._engine.logprobs(request)
        if count == 0 and params.prompt_logprobs is not None:
            top = [(0x41, -0.1), (0x42, -0.2), (0x43, -0.3)][: params.prompt_logprobs]
            changes["prompt_logprobs"] = [TokenLogprobs(one, -float(one), top) for one in request.prompt_token_ids[1:]]
        if params.pooling is not None and output.finish_reason == "length":
            ids = request.prompt_token_ids
            changes["embedding"] = [ids[-1] if params.pooling == "last" else sum(ids) / len(ids), 1.0, 2.0, 3.0]
        self._engine.num_tokens += len(output.new_token_ids)
        return msgspec.structs.replace(output, **changes)

    def has_failed(self, request: Request) -> bool:
        failing = self._engine.fail_after
        return failing is not None and request.wants_output and request.num_output_tokens >= failing[0]


class StubSupervisor:
    """What `AsyncEngine` asks of a `Supervisor`, of a core in this process. Tests set how it is."""

    def __init__(self, core: ScriptedCore) -> None:
        self.core = core
        self.info = core.ready
        self.status: Status = "ok"
        self.is_dead = False
        self.num_restarts = 0
        self.aborted: list[str] = []
        self.client = SimpleNamespace(pid=os.getpid(), stats=None)
        self.on_outputs: Callable[[list[TokenOutput]], None]
        self.on_end: Callable[[Unavailable], None]

    @property
    def is_available(self) -> bool:
        return self.status == "ok" and not self.is_dead

    async def wait_available(self, deadline: float | None) -> None:
        raise EngineDead() if self.is_dead else Unavailable(f"it is {self.status}", code=f"engine_{self.status}")

    def send(self, message: ToCore) -> None:
        if isinstance(message, AbortRequests):
            self.aborted += message.request_ids
        if answer := self.core.take(message):
            asyncio.get_running_loop().call_soon(self.on_outputs, answer.outputs)

    def step(self, request_ids: Sequence[str]) -> None:
        message = self.core.step(request_ids)
        self.client.stats = message.stats
        self.on_outputs(message.outputs)

    def note_answer(self) -> None:
        pass

    def stats(self) -> StepStats:
        return self.core.stats()

    def health(self) -> EngineHealth:
        status: Status = "dead" if self.is_dead else self.status
        return EngineHealth(status=status, reason="" if status == "ok" else f"it is {status}", num_steps=7)

    async def close(self, reason: str) -> None:
        self.is_dead = True
        self.on_end(EngineDead(reason))


def two_beams(request: Request) -> list[TokenLogprobs]:
    """The two likeliest outputs are `s`, by its sum of -1.3, and `long`, by each token's mean."""
    tops = {"long": {EOS: -0.3}, "lon": {"g": -0.3}, "lo": {"n": -0.3}, "l": {"o": -0.3}, "s": {EOS: -0.7}}
    before = bytes(token_id for token_id in request.token_ids[:-1] if token_id < 256).decode()
    start = {"l": -0.5, "s": -0.6}
    top = next((top for end, top in tops.items() if before.endswith(end)), start)
    pairs = [(ord(one) if isinstance(one, str) else one, logprob) for one, logprob in top.items()]
    return [TokenLogprobs(*pairs[0], pairs)]


def idle_look() -> Snapshot:
    """Of an engine with eight blocks that has done nothing yet."""
    return Snapshot(StepStats(0.0, 0, 0, 0, 0.0, 0, None, Counters()), [], bytes(8))


def _part(part: str, name: str) -> Any:
    """An attribute of a part of the engine, as one of the engine's own."""
    return property(
        lambda self: getattr(getattr(self, part), name), lambda self, value: setattr(getattr(self, part), name, value)
    )


class FakeEngine(AsyncEngine):
    """`script(prompt, params)` gives a request's text; `delay` passes before each token."""

    info = _part("_supervisor", "info")
    status = _part("_supervisor", "status")
    is_dead = _part("_supervisor", "is_dead")
    num_restarts = _part("_supervisor", "num_restarts")
    core = _part("_supervisor", "core")
    aborted = _part("_supervisor", "aborted")
    tokenizer = _part("_inputs", "tokenizer")
    default_sampling = _part("_inputs", "default_sampling")
    default_pooling = _part("_inputs", "default_pooling")
    chat_template = _part("_inputs", "chat_template")
    own_tool_template = _part("_inputs", "own_tool_template")
    messages = _part("_inputs", "messages")
    template_kwargs = _part("_inputs", "template_kwargs")

    def __init__(
        self,
        script: Callable[[str, SamplingParams], str] = lambda prompt, params: f"<{prompt}>",
        *,
        max_model_len: int = 1000,
        bos_token_id: int | None = BOS,
        default_sampling: dict[str, Any] | None = None,
    ) -> None:
        self.script = script
        self.delay = 0.0
        self.fail_after: tuple[int, BaseException] | None = None
        """Tokens before an error is raised, and the error."""
        self.num_cached_tokens = 0
        self.is_full = False
        self.end: Unavailable | None = None
        """What `end_all` was given; set before, what requests end with."""
        self.num_tokens = 0
        self.deadlines: list[float | None] = []
        self.intervals: list[int] = []
        self.requests: list[tuple[str, list[int], SamplingParams, int, str | None]] = []
        self.look = idle_look
        self.num_looks = 0
        supervisor = StubSupervisor(ScriptedCore(self, max_model_len))
        super().__init__(supervisor, FakeInputs(bos_token_id, default_sampling or {}), WaitingRoom())

    def logprobs(self, request: Request) -> list[TokenLogprobs]:
        """Of the newest token."""
        token_id = request.token_ids[-1]
        top = [(token_id, -0.5), (0x80, float("-inf"))][: request.sampling_params.logprobs]
        return [TokenLogprobs(token_id, -0.5, top)]

    async def snapshot(self) -> Snapshot:
        self.num_looks += 1
        await asyncio.sleep(self.delay)
        return self.look()

    def check_room(self, num_requests: int, num_tokens: int, priority: int = 0) -> None:
        if self.is_full:
            raise QueueFull("no room", retry_after=9)

    def end_all(self, error: Unavailable) -> None:
        self.end = error
        super().end_all(error)
        self.core.requests.clear()

    def _request(self, request_id: str, token_ids: list[int], params: SamplingParams, **options: Any) -> AddRequest:
        request = super()._request(request_id, token_ids, params, **options)
        self.requests.append((request_id, token_ids, params, request.priority, request.cache_salt))
        return request

    async def embed(self, prompts: Sequence[list[int]], **options: Any) -> list[list[float]]:
        names = ("request_id", "pooling", "priority", "cache_salt")
        self.embedded = (list(prompts), *(options[name] for name in names))
        return await super().embed(prompts, **options)

    async def generate_many(
        self, choices: Sequence[tuple[list[int], SamplingParams]], *, request_id: str, **options: Any
    ) -> AsyncGenerator[OutputBatch, None]:
        self.intervals.append(options.get("interval", 1))
        self.deadlines.append(options.get("deadline"))
        names = [f"{request_id}-{index}" for index in range(len(choices))]
        batches = super().generate_many(choices, request_id=request_id, **options)
        async with aclosing(batches):
            while True:
                reading = asyncio.ensure_future(anext(batches, None))
                try:
                    await self._step_until(reading, names)
                finally:
                    if not reading.done():
                        reading.cancel()
                        with contextlib.suppress(asyncio.CancelledError):
                            await reading
                if (batch := reading.result()) is None:
                    return
                yield batch

    async def _step_until(self, reading: "asyncio.Future[Any]", request_ids: list[str]) -> None:
        while True:
            if self.delay:
                await asyncio.wait({reading}, timeout=self.delay)
            else:
                await asyncio.sleep(0)
            if reading.done():
                return
            error = self.end
            running = [self.core.requests[name] for name in request_ids if name in self.core.requests]
            if self.fail_after and any(map(self.core.has_failed, running)):
                error = error or self.fail_after[1]
            if isinstance(error, KeyboardInterrupt):
                raise error
            if error is not None and not isinstance(error, RequestFailed | InvalidRequest):
                super().end_all(error)  # whatever it is, it is raised there
                self.core.requests.clear()
            else:
                self._supervisor.step(request_ids)
