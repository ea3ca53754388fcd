"""Routes that take a body and answer with one JSON object."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from configs.settings import ServerConfig
from server.disconnect import until_disconnect
from server.operation import Operation
from server.parsing import BodyParser, ignored_header
from server.protocol.common import ModelRequest
from server.serving import Serving, serving_of

Body = TypeVar("Body", bound=ModelRequest)
Prepare = Callable[[Serving, Body], Awaitable[Any]]
"""What texts become: the answer, or what `Answer` needs."""
Answer = Callable[[Serving, Body, Any], Coroutine[Any, Any, bytes]]
"""What the engine makes of that: JSON."""


class WholeRoute(Generic[Body]):
    """Called with a request; raises `RequestError`."""

    def __init__(
        self, body_type: type[Body], prepare: Prepare[Body], config: ServerConfig, answer: Answer[Body] | None = None
    ) -> None:
        self.parser = BodyParser(body_type, config)
        self.prepare = prepare
        self.answer = answer

    async def __call__(self, request: Request) -> Response:
        serving = serving_of(request)
        serving.check_alive()
        parsed = await self.parser.parse(request)
        body = parsed.body
        serving.check_model(body.model)

        async def prepared() -> Any:
            made = await self.prepare(serving, body)
            return msgspec.json.encode(made) if self.answer is None else made

        content = await serving.preparation.prepare(request, prepared)
        if self.answer is not None:
            content = await until_disconnect(request.receive, self.answer(serving, body, content))
        return Response(content, headers=ignored_header(parsed.ignored_fields), media_type="application/json")


def whole(
    paths: str,
    body_type: type[Body],
    prepare: Prepare[Body],
    summary: str,
    answers: type | tuple[type, ...],
    config: ServerConfig,
    answer: Answer[Body] | None = None,
) -> Operation:
    """The row of a `WholeRoute`."""
    kinds = answers if isinstance(answers, tuple) else (answers,)
    return Operation("POST", paths, WholeRoute(body_type, prepare, config, answer), summary, kinds, body=body_type)
