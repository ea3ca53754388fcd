"""`AsyncInputs`: an `InputProcessor` beside an event loop, which no text holds up. Imports no torch."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from configs.sampling import Reasoning, SamplingParams, ThinkingBudget

from .input_processor import InputProcessor, RenderedChat
from .messages import CoreReady
from .text.encode_process import encode_in_process
from .text.tokenizer import Tokenizer

Result = TypeVar("Result")

_LONG_TEXT = 2000
"""Characters; shorter texts are encoded on the event loop, in less time than a change of threads takes."""
_VERY_LONG_TEXT = 2**19
"""Characters; longer ones take a second and more, and some hundred times their size in memory."""
_THREADS = 5
"""The server prepares at most three large requests at a time, so the others always find two of them."""


class AsyncInputs:
    """May be used from several event loops."""

    def __init__(self, inputs: InputProcessor, info: Callable[[], CoreReady]) -> None:
        self._inputs = inputs
        self._info = info
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="octavo-text")

    @property
    def info(self) -> CoreReady:
        """What the running core, or else the latest one, has loaded."""
        return self._info()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._inputs.tokenizer

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Fields of `SamplingParams` for requests that leave them out, from the checkpoint's generation config."""
        return self._inputs.default_sampling

    async def encode(self, text: str, *, add_special_tokens: bool = True, must_fit: bool = False) -> list[int]:
        """Token ids of `text`; a long one does not hold up other requests.

        With `must_fit`, a text that is too long for the model is refused, mostly before it is encoded. Raises
        `ContextLengthExceeded`, and `Unavailable` for want of memory.
        """
        if len(text) < _LONG_TEXT:
            return self._inputs.encode(text, add_special_tokens=add_special_tokens)
        token_ids = await self._in_thread(lambda: self._encode(text, add_special_tokens, must_fit))
        if token_ids is None:
            return await encode_in_process(self._inputs.model, text, add_special_tokens=add_special_tokens)
        return token_ids

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        return await self._in_thread(lambda: self.tokenizer.decode(token_ids, skip_special_tokens))

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template in use."""
        return self._inputs.chat_template

    @property
    def default_pooling(self) -> Literal["last", "mean"]:
        return self._inputs.default_pooling

    @property
    def tool_template(self) -> str | None:
        return self._inputs.tool_template

    async def render_chat(
        self, messages: Sequence[dict[str, Any]], must_fit: bool = False, /, **kwargs: Any
    ) -> RenderedChat:
        """See `InputProcessor.render`, and `encode` for `must_fit`."""

        def render() -> tuple[str, list[int] | None]:
            text = self._inputs.render(messages, **kwargs)
            return text, self._encode(text, False, must_fit)

        text, token_ids = await self._in_thread(render)
        if token_ids is None:
            token_ids = await encode_in_process(self._inputs.model, text, add_special_tokens=False)
        return RenderedChat(text, token_ids)

    async def thinking_budget(self, max_tokens: int, reasoning: Reasoning, end: str) -> ThinkingBudget:
        """See `InputProcessor.thinking_budget`."""
        return await self._in_thread(lambda: self._inputs.thinking_budget(max_tokens, reasoning, end))

    async def encode_infill(self, prefix: str, suffix: str, *, must_fit: bool = False) -> list[int]:
        """See `InputProcessor.encode_infill`, and `encode` for `must_fit`."""

        def encode() -> list[int]:
            if must_fit:
                for text in (prefix, suffix):
                    self._inputs.check_length(text, self.info)
            return self._inputs.encode_infill(prefix, suffix)

        return await self._in_thread(encode)

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise `InvalidRequest` or `ContextLengthExceeded` for what the core could not answer."""
        self._inputs.validate(prompt_token_ids, params, self.info)

    def close_threads(self) -> None:
        """What has not begun is not begun any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str, add_special_tokens: bool, must_fit: bool) -> list[int] | None:
        """None for a very long text, which is not encoded here."""
        if must_fit:
            self._inputs.check_length(text, self.info)
        if len(text) > _VERY_LONG_TEXT:
            return None
        return self._inputs.encode(text, add_special_tokens=add_special_tokens)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
