"""`Mailbox`: one slot per request between the core and a reader. Imports no torch."""

import asyncio

import msgspec

from configs.errors import EngineDead

from .messages import TokenOutput


class Mailbox:
    """What its one reader has not taken yet is merged: a slow reader holds up nobody, and costs token ids only."""

    def __init__(self) -> None:
        self._outputs: dict[str, TokenOutput] = {}
        self._dead: str | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, output: TokenOutput) -> None:
        waiting = self._outputs.get(output.request_id)
        self._outputs[output.request_id] = output if waiting is None else _merge(waiting, output)
        self._wake()

    def die(self, reason: str) -> None:
        self._dead = reason
        self._wake()

    def filled(self) -> asyncio.Future[None]:
        """Done when `take` has an answer."""
        self._reader = asyncio.get_running_loop().create_future()
        if self._outputs or self._dead is not None:
            self._wake()
        return self._reader

    def take(self) -> list[TokenOutput]:
        """One output of each request that has any. Raises `EngineDead` when there will be none."""
        if not self._outputs and self._dead is not None:
            raise EngineDead(self._dead)
        outputs, self._outputs = self._outputs, {}
        return list(outputs.values())

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


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
