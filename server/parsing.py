"""Request bodies: from bytes to a checked request, or an error that names the field.

Large bodies are parsed off the event loop; since the parser holds the interpreter's lock, what they may hold is
bounded before any object is made, so that other streams never stall for long.
"""

import asyncio
import re
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request

from configs.errors import InvalidRequest, RequestError
from server.protocol.common import GenerationRequest
from server.protocol.unsupported import WITHOUT_EFFECT, check_unsupported, is_unsupported

INLINE_BYTES = 64 * 2**10
"""Bodies up to this size are parsed on the event loop: faster than a thread."""
MAX_CONTAINERS = 250_000
"""Arrays and objects in one body. Each costs about 0.25 µs; text holds fewer brackets than tokens."""
MAX_VALUES = 4_000_000
"""Commas in one body, and so elements of lists: about 20 ns each; no context has as many token ids."""

Body = TypeVar("Body", bound=GenerationRequest)


class BodyTooLarge(RequestError):
    status = 413
    type = "invalid_request_error"


@dataclass(frozen=True)
class Parsed(Generic[Body]):
    body: Body
    ignored_fields: list[str]
    """Fields that no known API has."""


class BodyParser(Generic[Body]):
    """Parses bodies of one route. `max_bytes` bounds what is read at all."""

    def __init__(self, body_type: type[Body], max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.known = {field.name for field in msgspec.structs.fields(body_type)}
        self.fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self.body = msgspec.json.Decoder(body_type)

    async def parse(self, request: Request) -> Parsed[Body]:
        """Raises `InvalidRequest`, or `BodyTooLarge` without reading the rest."""
        data = await self._read(request)
        if len(data) <= INLINE_BYTES:
            return self.decode(data)
        return await asyncio.get_running_loop().run_in_executor(None, self.decode, data)

    def decode(self, data: bytes) -> Parsed[Body]:
        if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
            raise InvalidRequest(f"the body holds more than {MAX_CONTAINERS} arrays and objects")
        if data.count(b",") > MAX_VALUES:
            raise InvalidRequest(f"the body holds more than {MAX_VALUES} values")
        try:
            raw = self.fields.decode(data)
            unsupported = {name: _plain(raw[name]) for name in raw if is_unsupported(name)}
            body = self.body.decode(data)
        except RecursionError as error:
            raise InvalidRequest("the body is nested too deeply") from error
        except msgspec.ValidationError as error:
            raise InvalidRequest(str(error).replace("`", ""), param=_param(str(error))) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the body is not JSON: {error}", code="invalid_json") from error
        for name, value in unsupported.items():
            check_unsupported(name, value, body.n)
        ignored = [name for name in raw if name not in self.known and name not in unsupported]
        return Parsed(body, [name for name in ignored if name not in WITHOUT_EFFECT])

    async def _read(self, request: Request) -> bytes:
        kind = request.headers.get("content-type")
        if kind is not None and "json" not in kind:
            raise InvalidRequest(f"content-type must be application/json; got {kind}")
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self.max_bytes:
            raise self._too_large(f"{announced} bytes")
        data = bytearray()
        async for piece in request.stream():
            data += piece
            if len(data) > self.max_bytes:
                raise self._too_large("more")
        return bytes(data)

    def _too_large(self, size: str) -> BodyTooLarge:
        return BodyTooLarge(f"the body may have {self.max_bytes} bytes; got {size}", code="body_too_large")


def _plain(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw)


def _param(message: str) -> str | None:
    """The top-level field of an error message: "… - at `$.prompt[0]`" -> "prompt"."""
    path = re.search(r"`\$\.?([^`.\[]*)[^`]*`$", message)
    missing = re.search(r"missing required field `([^`]*)`", message)
    if path and path[1]:
        return path[1]
    return missing[1] if missing else None
