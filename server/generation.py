"""One generating request, in no protocol's words: its choices run, and what was counted."""

import sys
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from configs.errors import InvalidRequest
from configs.sampling import SamplingParams
from engine.outputs import CompletionOutput, OutputBatch, RequestOutput
from server.metrics.records import current_owner, note_response
from server.serving import Serving, own_cache_salt

FieldNames = Mapping[str, str]
"""Parameters of the engine (prompt, or a field of `SamplingParams`) to fields of a request; others keep their names."""


@contextmanager
def naming(names: FieldNames) -> Iterator[None]:
    """Let an `InvalidRequest` that leaves the block name the request's field, where the engine names its own."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None:
            error.param = names.get(error.param, error.param)
        raise


@dataclass(frozen=True)
class Prompt:
    """Token ids that fit the model, checked, and how they are continued."""

    token_ids: list[int]
    params: SamplingParams
    text: str | None = None
    """For answers that begin with it."""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How a request runs, whatever its prompts are."""

    field_names: FieldNames = field(default_factory=dict)
    """Of errors."""
    request_id: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    """Seconds from now on."""
    beam_length_penalty: float | None = None
    """With it the choices of a prompt are its likeliest sequences, and there is only the `whole` answer."""
    passed_over: Sequence[str] = ()
    """Parts of the request that nothing follows from, for the header that names them."""


def new_ids(serving: Serving, id_prefix: str, request_id: str | None) -> tuple[str, str]:
    """Ids of the answer and of the engine's request, which differ since clients with other keys may choose the same
    `request_id`. Raises `InvalidRequest` where another request of this key has it."""
    if request_id:
        serving.requests.claim(request_id)
    answer_id = id_prefix + (request_id or uuid.uuid4().hex)
    owner = current_owner()
    return answer_id, f"{answer_id}-{owner}" if request_id and owner else answer_id


class Generation:
    """The choices of one request. Choice `prompt * n + j` is the j-th of its prompt."""

    def __init__(self, serving: Serving, prompts: list[Prompt], options: GenerationOptions, *, id_prefix: str) -> None:
        self.serving = serving
        self.prompts = prompts
        self.n = prompts[0].params.n
        self.id, self._engine_id = new_ids(serving, id_prefix, options.request_id)
        note_response(self.id, self.n if options.beam_length_penalty is None else 1)
        self.created = int(time.time())
        self.latest: list[RequestOutput | None] = [None] * (len(prompts) * self.n)
        """Of each choice; it holds the choice's counts. Whoever reads `run` keeps it up to date."""
        self.passed_over = [*dict.fromkeys(options.passed_over)]
        self._priority = options.priority or 0
        cache_salt, deadline = own_cache_salt(options.cache_salt), serving.deadline(options.timeout)
        self._scheduling: Any = {"priority": self._priority, "cache_salt": cache_salt, "deadline": deadline}
        self._has_room = False
        self._field_names = options.field_names
        self._beam_length_penalty = options.beam_length_penalty

    def run(self, interval: int | None = None) -> AsyncGenerator[OutputBatch, None]:
        """The outputs as they come: the first tokens at once, then every `interval` tokens of a choice (default: the
        server's). Raises what the engine raises."""
        outputs = self.serving.engine.generate_many(
            [(prompt.token_ids, prompt.params.for_choice(j)) for prompt in self.prompts for j in range(self.n)],
            request_id=self._engine_id,
            **self._scheduling,
            interval=interval or self.serving.config.stream_interval,
            has_room=self._has_room,
        )
        return outputs if self.prompts[0].params.structured is None else self._naming_fields(outputs)

    def check_room(self) -> None:
        """Raise `QueueFull` if it has to be refused now; once this has passed, `run` does not refuse it later."""
        self.serving.engine.check_room(len(self.latest), self.num_prompt_tokens * self.n, self._priority)
        self._has_room = True

    @property
    def longest_interval(self) -> int:
        """The interval for whole answers. Stop strings are found here, token by token; else the end is enough."""
        return 1 if self.prompts[0].params.stop else sys.maxsize

    async def whole(self) -> list[CompletionOutput]:
        """Run to the end, and return all choices. Raises what the engine raises."""
        if self._beam_length_penalty is not None:
            return await self._beam_search(self._beam_length_penalty)
        outputs = [CompletionOutput(index) for index in range(len(self.latest))]
        async with aclosing(self.run(self.longest_interval)) as batches:
            async for batch in batches:
                for index, output in batch:
                    self.latest[index] = output
                    outputs[index].extend(output)
        return outputs

    async def _beam_search(self, length_penalty: float) -> list[CompletionOutput]:
        outputs: list[CompletionOutput] = []
        for index, prompt in enumerate(self.prompts):
            for output in await self.serving.engine.beam_search(
                prompt.token_ids,
                prompt.params,
                length_penalty=length_penalty,
                request_id=f"{self._engine_id}-{index}",
                **self._scheduling,
            ):
                counts = len(prompt.token_ids), 0, len(output.token_ids)
                latest = RequestOutput(output.text, output.token_ids, None, output.finish_reason, None, *counts)
                self.latest[len(outputs)] = latest
                output.index = len(outputs)
                outputs.append(output)
        return outputs

    def prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.n]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each of which counts once, whatever `n` is."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_output_tokens(self) -> int:
        return sum(output.num_output_tokens for output in self.latest if output)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of prompts that were cached. Of a prompt with several choices the first one tells what was cached."""
        return sum(output.num_cached_tokens for output in self.latest[:: self.n] if output)

    async def _naming_fields(self, outputs: AsyncGenerator[OutputBatch, None]) -> AsyncGenerator[OutputBatch, None]:
        """The same outputs, with errors that name fields: the core refuses a grammar when it has compiled it."""
        async with aclosing(outputs):
            with naming(self._field_names):
                async for batch in outputs:
                    yield batch
