"""Routes that take a body and answer with one JSON object."""

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

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


class WholeRoute(Generic[Body]):
    """Called with a request; raises `RequestError`."""

    def __init__(
        self, body_type: type[Body], answer: Callable[[Serving, Body], Awaitable[object]], config: ServerConfig
    ) -> None:
        self.parser = BodyParser(body_type, config)
        self.answer = answer

    async def __call__(self, request: Request) -> Response:
        serving = serving_of(request)
        serving.check_alive()
        parsed = await self.parser.parse(request)
        serving.check_model(parsed.body.model)
        content = await until_disconnect(request.receive, self._encoded(serving, parsed.body))
        return Response(content, headers=ignored_header(parsed.ignored_fields), media_type="application/json")

    async def _encoded(self, serving: Serving, body: Body) -> bytes:
        return msgspec.json.encode(await self.answer(serving, body))


def whole(
    paths: str,
    body_type: type[Body],
    answer: Callable[[Serving, Body], Awaitable[object]],
    summary: str,
    answers: type | tuple[type, ...],
    config: ServerConfig,
) -> Operation:
    """The row of a `WholeRoute`."""
    kinds = answers if isinstance(answers, tuple) else (answers,)
    return Operation("POST", paths, WholeRoute(body_type, answer, config), summary, kinds, body=body_type)
