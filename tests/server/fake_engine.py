"""An engine without a model: the face of `AsyncEngine`, a byte tokenizer, and text that the test scripts.

Token ids 0-255 are bytes, 256 begins and 257 ends a sequence. A request gets `script` token by token (one byte
each) and ends at its end, at a stop string or at max_tokens.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Literal

from configs.errors import ContextLengthExceeded, InvalidRequest, QueueFull, Unavailable
from configs.sampling import Reasoning, SamplingParams, ThinkingBudget
from engine.input_processor import RenderedChat
from engine.messages import CoreReady, Snapshot, StepStats, TokenLogprobs
from engine.observer import Observer
from engine.outputs import CompletionOutput, OutputBatch, RequestOutput
from engine.supervisor import EngineHealth, Status
from scheduler.timeline import Counters
from tests.server.fake_core import FakeCore

BOS, EOS, VOCAB_SIZE = 256, 257, 258


class ByteTokenizer:
    def __init__(self, bos_token_id: int | None = BOS) -> None:
        self.bos_token_id = bos_token_id
        self.special_texts: dict[str, int] = {}
        self.special_tokens = {"bos_token": "<begin>", "eos_token": "<end>"}

    def special_id(self, text: str) -> int | None:
        return self.special_texts.get(text)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<end>"

    def token(self, token_id: int) -> str:
        return f"<0x{token_id:02X}>"


def idle_look() -> Snapshot:
    """Of an engine with eight blocks that has done nothing yet."""
    return Snapshot(StepStats(0.0, 0, 0, 0, 0.0, 0, None, Counters()), [], bytes(8))


class FakeEngine:
    """`script(prompt, params)` gives a request's text; `delay` passes before each token."""

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
        self.fail_after: tuple[int, Exception] | None = None
        """Tokens before an error is raised, and the error."""
        self.num_cached_tokens = 0
        self.is_dead = False
        self.status: Status = "ok"
        self.is_full = False
        self.end: Unavailable | None = None
        """What `end_all` was given."""
        self.deadlines: list[float | None] = []
        self.tokenizer = ByteTokenizer(bos_token_id)
        self.default_sampling = default_sampling or {}
        self.chat_template: str | None = None
        self.own_tool_template: str | None = None
        self.default_pooling: Literal["last", "mean"] = "last"
        self.info = CoreReady(
            architecture="FakeForCausalLM",
            num_parameters=0,
            dtype="float32",
            kv_cache_dtype="float32",
            quantization="none",
            device="cpu",
            attention_backend="none",
            notes=[],
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            kv_cache_tokens=4096,
            block_size=16,
            num_threads=1,
            timings={"load": 0.1},
        )
        self.requests: list[tuple[str, list[int], SamplingParams, int, str | None]] = []
        self.template_kwargs: dict[str, Any] = {}
        self.messages: list[dict[str, Any]] = []
        self.intervals: list[int] = []
        self.aborted: list[str] = []
        self.num_tokens = 0
        self.look = idle_look
        self.num_looks = 0
        self.core = FakeCore()
        self.num_restarts = 0
        self.pid = os.getpid()

    @property
    def observer(self) -> Observer:
        return self.core.observer

    @observer.setter
    def observer(self, observer: Observer) -> None:
        self.core.observer = observer

    def stats(self) -> StepStats:
        return self.core.stats()

    def health(self) -> EngineHealth:
        status: Status = "dead" if self.is_dead else self.status
        return EngineHealth(status=status, reason="" if status == "ok" else f"it is {status}", num_steps=7)

    async def snapshot(self) -> Snapshot:
        self.num_looks += 1
        await asyncio.sleep(self.delay)
        return self.look()

    def check_room(self, num_requests: int, num_tokens: int, priority: int = 0) -> None:
        if self.is_full:
            raise QueueFull("no room", retry_after=9)

    def end_all(self, error: Unavailable) -> None:
        self.end = error

    async def encode(self, text: str, *, add_special_tokens: bool = True, must_fit: bool = False) -> list[int]:
        prefix = [BOS] if add_special_tokens and text and self.tokenizer.bos_token_id is not None else []
        return prefix + list(text.encode())

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = [token_id for token_id in token_ids if token_id < 256 or not skip_special_tokens]
        return b"".join(map(self.tokenizer.token_bytes, shown)).decode(errors="replace")

    async def thinking_budget(self, max_tokens: int, reasoning: Reasoning, end: str) -> ThinkingBudget:
        return ThinkingBudget(max_tokens, tuple(end.encode()), closing=reasoning.closing, opening=reasoning.opening)

    async def encode_infill(self, prefix: str, suffix: str, *, must_fit: bool = False) -> list[int]:
        return [0xF8, *prefix.encode(), 0xF9, *suffix.encode(), 0xFA]

    @property
    def tool_template(self) -> str | None:
        return self.own_tool_template or self.chat_template

    async def render_chat(
        self, messages: Sequence[dict[str, Any]], must_fit: bool = False, /, **template_kwargs: Any
    ) -> RenderedChat:
        self.messages, self.template_kwargs = list(messages), template_kwargs
        if any(message["role"] == "forbidden" for message in messages):
            raise InvalidRequest("the template knows no such role", param="messages")
        text = "|".join(message["content"] for message in messages)
        return RenderedChat(text, list(text.encode()))

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        limit = self.info.max_model_len
        wanted = len(prompt_token_ids) + (1 if params.max_tokens is None else params.max_tokens)
        if not prompt_token_ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if wanted > limit:
            param = "prompt" if len(prompt_token_ids) >= limit else "max_tokens"
            raise ContextLengthExceeded(f"the context has {limit} tokens; the request needs {wanted}", param=param)
        if not all(0 <= token_id < VOCAB_SIZE for token_id in prompt_token_ids):
            raise InvalidRequest(f"token ids are between 0 and {VOCAB_SIZE - 1}", param="prompt")
        params.check_token_ids(VOCAB_SIZE)

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        choices = [(prompt_token_ids, params)]
        batches = self.generate_many(choices, request_id=request_id, priority=priority, cache_salt=cache_salt)
        async with aclosing(batches):
            async for [(_, output)] in batches:
                yield output

    async def generate_many(
        self,
        choices: Sequence[tuple[list[int], SamplingParams]],
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline: float | None = None,
        interval: int = 1,
        has_room: bool = False,
    ) -> AsyncGenerator[OutputBatch, None]:
        if not has_room:
            self.check_room(len(choices), 0)
        running: dict[int, Iterator[RequestOutput]] = {}
        num_output = [0] * len(choices)
        self.intervals.append(interval)
        self.deadlines.append(deadline)
        for index, (token_ids, params) in enumerate(choices):
            self.requests.append((f"{request_id}-{index}", token_ids, params, priority, cache_salt))
            prompt = bytes(token_id for token_id in token_ids if token_id < 256).decode(errors="replace")
            running[index] = self._outputs(token_ids, self.script(prompt, params), params)
            self.core.begin(f"{request_id}-{index}", token_ids, params)
        try:
            while running:
                await asyncio.sleep(self.delay)
                if self.end is not None:
                    raise self.end
                if deadline is not None and time.monotonic() >= deadline:
                    late = [(index, self._late(choices[index][0], num_output[index])) for index in running]
                    self.core.step([(f"{request_id}-{index}", output) for index, output in late])
                    running.clear()
                    yield late
                    return
                batch = [(index, next(outputs)) for index, outputs in running.items()]
                for index, output in batch:
                    if self.fail_after and output.num_output_tokens > self.fail_after[0]:
                        raise self.fail_after[1]
                    self.num_tokens += 1
                    num_output[index] = output.num_output_tokens
                    if output.finish_reason is not None:
                        del running[index]
                self.core.step([(f"{request_id}-{index}", output) for index, output in batch])
                yield batch
        finally:
            is_abort = isinstance(sys.exception(), GeneratorExit | asyncio.CancelledError)
            for index in running:
                self.core.end(f"{request_id}-{index}", "abort" if is_abort else "error", num_output[index])
            self.aborted += [f"{request_id}-{index}" for index in running]

    async def embed(
        self,
        prompts: Sequence[list[int]],
        *,
        request_id: str,
        pooling: Literal["last", "mean"],
        priority: int = 0,
        cache_salt: str | None = None,
        deadline: float | None = None,
    ) -> list[list[float]]:
        """Of last or mean token id x: [x, 1, 2, 3]"""
        self.embedded = (list(prompts), request_id, pooling, priority, cache_salt)
        self.deadlines.append(deadline)
        names = [f"{request_id}-{index}" for index in range(len(prompts))]
        for name, token_ids in zip(names, prompts, strict=True):
            self.core.begin(name, token_ids, SamplingParams(max_tokens=0, pooling=pooling))
        await asyncio.sleep(self.delay)
        outputs = [RequestOutput("", [], None, "length", None, len(token_ids), 0, 0) for token_ids in prompts]
        self.core.step(list(zip(names, outputs, strict=True)))
        return [[ids[-1] if pooling == "last" else sum(ids) / len(ids), 1.0, 2.0, 3.0] for ids in prompts]

    async def beam_search(
        self, prompt_token_ids: list[int], params: SamplingParams, *, length_penalty: float, **options: Any
    ) -> list[CompletionOutput]:
        """Beams `0 x`, `1 x`, … for a length penalty of x."""
        texts = [f"{index} {length_penalty:g}" for index in range(params.n)]
        return [CompletionOutput(i, text, list(text.encode()), finish_reason="stop") for i, text in enumerate(texts)]

    def _late(self, prompt: list[int], num_output: int) -> RequestOutput:
        return RequestOutput("", [], None, "timeout", None, len(prompt), self.num_cached_tokens, num_output)

    def _outputs(self, prompt: list[int], script: str, params: SamplingParams) -> Iterator[RequestOutput]:
        limit = self.info.max_model_len - len(prompt) if params.max_tokens is None else params.max_tokens
        counts = {"num_prompt_tokens": len(prompt), "num_cached_tokens": self.num_cached_tokens}
        about_prompt = self._prompt_logprobs(prompt, params)
        if limit == 0:
            logprobs = None if params.logprobs is None else []
            yield RequestOutput(
                "", [], logprobs, "length", None, num_output_tokens=0, prompt_logprobs=about_prompt, **counts
            )
        text = ""
        for count, letter in enumerate([*script, ""], start=1):
            text = (text + letter)[-100:]
            stop = next((one for one in params.stop if text.endswith(one)), None)
            ended = "stop" if letter == "" or stop else "length" if count == limit else None
            yield RequestOutput(
                text="" if stop else letter,
                token_ids=[ord(letter) if letter else EOS],
                logprobs=self._logprobs(letter, params),
                finish_reason=ended,
                stop_reason=stop,
                num_output_tokens=count,
                prompt_logprobs=about_prompt if count == 1 else None,
                **counts,
            )
            if ended:
                return

    def _prompt_logprobs(self, prompt: list[int], params: SamplingParams) -> list[TokenLogprobs] | None:
        """The logprob of a token is minus its id."""
        if params.prompt_logprobs is None:
            return None
        top = [(0x41, -0.1), (0x42, -0.2), (0x43, -0.3)][: params.prompt_logprobs]
        return [TokenLogprobs(token_id, -float(token_id), top) for token_id in prompt[1:]]

    def _logprobs(self, letter: str, params: SamplingParams) -> list[TokenLogprobs] | None:
        if params.logprobs is None:
            return None
        token_id = ord(letter) if letter else EOS
        top = [(token_id, -0.5), (0x80, float("-inf"))][: params.logprobs]
        return [TokenLogprobs(token_id, -0.5, top)]
