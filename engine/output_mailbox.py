"""`Mailbox`: one slot per request between the core and a reader. Imports no torch."""

import asyncio

import msgspec

from configs.errors import Unavailable

from .messages import TokenOutput


class Mailbox:
    """What its one reader has not taken yet is merged: a slow reader holds up nobody, and costs token ids only."""

    def __init__(self, interval: int = 1) -> None:
        """The reader is woken by a request's first output, by `interval` tokens of it, and by its last."""
        self._interval = interval
        self._begun: set[str] = set()
        self._is_due = False
        self._outputs: dict[str, TokenOutput] = {}
        self._dead: Unavailable | None = None
        self._reader: asyncio.Future[None] | None = None
        """What the reader waits for."""

    def put(self, output: TokenOutput) -> None:
        request_id = output.request_id
        waiting = self._outputs.get(request_id)
        if waiting is not None and waiting.finish_reason is not None:
            return  # ended by the core and, before the reader has seen that, by its deadline
        merged = self._outputs[request_id] = output if waiting is None else _merge(waiting, output)
        num_tokens = len(merged.new_token_ids)
        if num_tokens >= self._interval or merged.finish_reason is not None or request_id not in self._begun:
            self._begun.add(request_id)
            self._is_due = True
            if self._reader is not None and not self._reader.done():
                self._reader.set_result(None)

    def die(self, error: Unavailable) -> None:
        """Nothing more will come; the reader gets `error` behind what is here."""
        self._dead = error
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> list[TokenOutput]:
        """One output of each request that has any. Raises what `die` was given when there will be none."""
        if not self._is_due and self._dead is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if not self._outputs and self._dead is not None:
            raise self._dead.with_traceback(None)  # others raise it too
        self._is_due = False
        outputs, self._outputs = self._outputs, {}
        return list(outputs.values())

    def untaken(self, request_id: str) -> int:
        """How many tokens of a request lie here."""
        return len(self._outputs[request_id].new_token_ids) if request_id in self._outputs else 0


def _merge(old: TokenOutput, new: TokenOutput) -> TokenOutput:
    """Both end up in the old one's lists, so that a long wait costs no more per token than a short one."""
    old.new_token_ids.extend(new.new_token_ids)
    logprobs = old.logprobs
    if logprobs is None:
        logprobs = new.logprobs
    elif new.logprobs is not None:
        logprobs.extend(new.logprobs)
    return msgspec.structs.replace(
        new,
        new_token_ids=old.new_token_ids,
        logprobs=logprobs,
        prompt_logprobs=old.prompt_logprobs,  # those and the embedding come with the first output
        embedding=old.embedding,
    )
