"""Request bodies: from bytes to a checked request, or an error that names the field.

Large bodies are parsed off the event loop; since the parser holds the interpreter's lock, what they may hold is
bounded before any object is made, so that other streams never stall for long.
"""

import re
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request

from configs.errors import InvalidRequest, RequestError, shown
from configs.settings import ServerConfig
from server.preparation import SMALL_BYTES, Preparation
from server.protocol.common import RequestBody
from server.protocol.unsupported import asks_for_nothing, check_unsupported
from server.serving import serving_of

MAX_VALUES = 1_000_000
"""Values in one body; each takes some 50 ns. Arrays, objects and keys take as long as `_SLOW` values."""
_SLOW = 5
_PIECE = 2**18
"""Bytes; the interpreter's lock is held for milliseconds while values are counted in so many."""

_QUOTED = re.compile(r"""^(Invalid (?:enum )?value )(['"])(.*)\2(?= - at `[^`]*`$|$)""", re.DOTALL)

Body = TypeVar("Body", bound=RequestBody)


class BodyTooLarge(RequestError):
    status = 413
    type = "invalid_request_error"


@dataclass(frozen=True)
class Parsed(Generic[Body]):
    body: Body
    ignored_fields: list[str]
    """Fields that no known API has, and hints that nothing follows from."""


class BodyParser(Generic[Body]):
    """Parses bodies of one route."""

    def __init__(self, body_type: type[Body], config: ServerConfig) -> None:
        self.max_bytes = config.max_body_bytes
        self.strict_fields = config.strict_fields
        self.body_type = body_type
        fields = {field.encode_name for field in msgspec.structs.fields(body_type)}
        self.looked_at = body_type.unsupported.keys() | body_type.hints
        self.known = fields | self.looked_at | body_type.without_effect
        self.fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self.body = msgspec.json.Decoder(body_type)

    async def parse(self, request: Request) -> Parsed[Body]:
        """Raises `InvalidRequest`, or `BodyTooLarge` without reading the rest."""
        preparation = serving_of(request).preparation
        data = await self._read(request, preparation)
        if len(data) <= SMALL_BYTES:
            return self.decode(data)

        async def decoded() -> Parsed[Body]:
            return self.decode(data)

        return await preparation.run(request, decoded)

    def decode(self, data: bytes | bytearray) -> Parsed[Body]:
        if len(data) > SMALL_BYTES:
            check_number_of_values(data)
        try:
            raw = self.fields.decode(data)
            looked_at = {name: _plain(raw[name]) for name in raw if name in self.looked_at}
            body = self.body.decode(data)
        except RecursionError as error:
            raise InvalidRequest("the body is nested too deeply") from error
        except msgspec.ValidationError as error:
            raise InvalidRequest(validation_message(error), param=_param(str(error))) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the body is not JSON: {error}", code="invalid_json") from error
        for name in looked_at.keys() & self.body_type.unsupported:
            check_unsupported(self.body_type.unsupported, name, looked_at[name])
        check_one_of(body)
        ignored = [name for name in raw if name not in self.known]
        if ignored and self.strict_fields:
            raise InvalidRequest(f"unknown field {ignored[0][:64]}", param=ignored[0])
        hints = looked_at.keys() & self.body_type.hints
        ignored += sorted(name for name in hints if not asks_for_nothing(self.body_type.hints, name, looked_at[name]))
        return Parsed(body, ignored)

    async def _read(self, request: Request, preparation: Preparation) -> bytearray:
        kind = request.headers.get("content-type", "")
        if kind and "json" not in kind.lower() and not self.body_type.any_content_type:
            raise InvalidRequest(f"content-type must be application/json; got {kind[:64]}")
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self.max_bytes:
            raise self._too_large(f"{announced} bytes")
        data = bytearray()
        async for piece in request.stream():
            data += piece
            if len(data) > self.max_bytes:
                raise self._too_large("more")
            if len(data) > SMALL_BYTES:
                preparation.hold(request.scope, len(data))
        return data

    def _too_large(self, size: str) -> BodyTooLarge:
        return BodyTooLarge(f"the body may have {self.max_bytes} bytes; got {size}", code="body_too_large")


def check_number_of_values(data: bytes | bytearray) -> None:
    """Raises `InvalidRequest` for JSON that would be parsed for too long at a stretch."""
    if _weight(data) <= MAX_VALUES:  # with those in texts
        return
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    weight, is_text = 0, False
    for start in range(0, len(unescaped), _PIECE):
        parts = unescaped[start : start + _PIECE].split(b'"')
        weight += _weight(b"".join(parts[is_text::2]))
        is_text ^= len(parts) % 2 == 0
        if weight > MAX_VALUES:
            message = f"the body may hold {MAX_VALUES} values, of which each array, object and key counts as {_SLOW}"
            raise InvalidRequest(message)


def _weight(data: bytes | bytearray) -> int:
    return data.count(b",") + _SLOW * (data.count(b"[") + data.count(b"{") + data.count(b":"))


def check_one_of(body: RequestBody) -> None:
    """Raises `InvalidRequest` unless exactly one of the fields `one_of` is given."""
    given = [name for name in body.one_of if getattr(body, name) is not None]
    if body.one_of and len(given) != 1:
        message = f"exactly one of {', '.join(body.one_of)} must be given; got {' and '.join(given) or 'none'}"
        raise InvalidRequest(message, param=given[1] if given else body.one_of[0])


def _plain(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw)


def validation_message(error: msgspec.ValidationError) -> str:
    """msgspec's words, without a value that nobody else should read."""
    return _QUOTED.sub(lambda found: found[1] + shown(found[3]), str(error)).replace("`", "")


def _param(message: str) -> str | None:
    """The top-level field of an error message: "… - at `$.prompt[0]`" -> "prompt"."""
    path = re.search(r"`\$\.?([^`.\[]*)[^`]*`$", message)
    missing = re.search(r"missing required field `([^`]*)`", message)
    if path and path[1]:
        return path[1]
    return missing[1] if missing else None


def _place(name: str) -> str:
    """`tools[0] web_search`; without the type where that is no name, but any text."""
    place, _, kind = name.partition(" ")
    return name if shown(kind) == repr(kind) else place


def ignored_header(names: list[str]) -> dict[str, str]:
    """The response header that names ignored fields: at most 20, escaped for a header line."""
    printable = [_place(name)[:64].encode("ascii", "backslashreplace").decode() for name in names[:20]]
    cleaned = ["".join(letter if letter.isprintable() else "?" for letter in name) for name in printable]
    return {"x-octavo-ignored-fields": ", ".join(cleaned)} if cleaned else {}
