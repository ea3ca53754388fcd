"""GET /openapi.json."""

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.serving import serving_of


class DocumentRoute:
    """Made when it is first asked for."""

    def __init__(self) -> None:
        self.content: bytes | None = None

    async def __call__(self, request: Request) -> Response:
        if self.content is None:
            self.content = await asyncio.to_thread(_document, request)
        return Response(self.content, media_type="application/json")


def _document(request: Request) -> bytes:
    from server.openapi.document import openapi_document  # a start-up needs none of it

    document = openapi_document(request.app.state.operations, serving_of(request))
    return msgspec.json.encode(document)
