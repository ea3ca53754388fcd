"""Request bodies: read within bounds, validated by their pydantic model, and refused with the name of the field.

Large bodies are parsed off the event loop; since the parser holds the interpreter's lock, what they may hold is
bounded before any object is made, so that other streams never stall for long.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any, ClassVar, TypeVar, get_type_hints

import msgspec
from fastapi.datastructures import DefaultPlaceholder
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, core_schema
from starlette.requests import Request
from starlette.responses import Response

from configs.errors import InvalidRequest, RequestError, shown
from server.documented import reference
from server.metrics.records import CURRENT_REQUEST
from server.preparation import SMALL_BYTES, Result, Work
from server.serving import Serving, serving_of

UNTIL_ANSWERED = "octavo.until_answered"
"""Key in the scope: an `ExitStack` that ends when the whole answer has been sent."""
OVERDUE = "octavo.is_overdue"
"""Key in the state of a scope: the body ends where it does because its time was over."""
MAX_VALUES = 1_000_000
"""Values in one body; each takes some 50 ns. Arrays, objects and keys take as long as `_SLOW` values."""
_SLOW = 5
_MAX_ERRORS = 10_000
"""Of one body, which are looked at: each takes microseconds. Only objects with many keys have so many."""
_PIECE = 2**18
"""Bytes; the interpreter's lock is held for milliseconds while values are counted in so many."""


class BodyTooLarge(RequestError):
    status = 413
    type = "invalid_request_error"


class RequestTimeout(RequestError):
    status = 408
    type = "timeout_error"
    ends_connection = True


@dataclass(frozen=True, eq=False)  # typing takes equal marks for one, and 0 equals False
class Unsupported:
    """Marks a field that is refused, but for null and these values, which ask for nothing."""

    neutral: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "null"}, *map(_only, self.neutral)]}

    def _check(self, value: Any, info: core_schema.ValidationInfo) -> Any:
        if not _is_one_of(value, self.neutral):
            raise InvalidRequest(f"{info.field_name} is not supported by this server", param=info.field_name)
        return value


def _only(value: Any) -> dict[str, Any]:
    """The schema of a single value, in words that generators of clients know."""
    if isinstance(value, list):
        return {
            "type": "array",
            "items": _only(value[0]) if value else {},
            "minItems": len(value),
            "maxItems": len(value),
        }
    if isinstance(value, dict):
        properties = {name: _only(one) for name, one in value.items()}
        return {"type": "object", "properties": properties, "required": [*value], "additionalProperties": False}
    return {"const": value}


@dataclass(frozen=True, eq=False)
class Hint:
    """Marks a field that changes no answer here: other values than null and these are ignored, and reported."""

    neutral: tuple[Any, ...] = ()

    def is_ignored(self, value: Any) -> bool:
        return not _is_one_of(value, self.neutral)


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    equal = (value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
    return value is None or any(equal)


def _end_lists_at_first_error(schema: Any, handler: GetCoreSchemaHandler, seen: set[int]) -> None:
    """In all of the schema: a million errors take many seconds, during most of which no other thread runs."""
    if isinstance(schema, dict) and schema.get("type") == "definition-ref":
        schema = handler.resolve_ref_schema(schema)
    if not isinstance(schema, dict | list | tuple) or id(schema) in seen:
        return
    seen.add(id(schema))
    if isinstance(schema, dict) and schema.get("type") in ("list", "tuple"):
        schema["fail_fast"] = True
    for inner in [*(schema.values() if isinstance(schema, dict) else schema)]:
        _end_lists_at_first_error(inner, handler, seen)


class RequestBody(BaseModel):
    """What every route's body is. Fields that it does not declare are ignored and reported, or refused with
    --strict-fields. A field of None was left out, or sent as null."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    any_content_type: ClassVar[bool] = False
    """Whatever its content type says, the body is JSON. Elsewhere it says so, or nothing."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _end_lists_at_first_error(schema, handler, set())
        return schema

    @property
    def unknown_fields(self) -> list[str]:
        """Fields that no known API has."""
        return [*(self.model_extra or ())]

    @property
    def ignored_fields(self) -> list[str]:
        """Unknown fields, and hints that nothing follows from."""
        hints = ((name, hint) for name, hint in _hints(type(self)).items() if name in self.model_fields_set)
        return self.unknown_fields + sorted(name for name, hint in hints if hint.is_ignored(getattr(self, name)))


Body = TypeVar("Body", bound=RequestBody)


@cache
def _hints(body: type[RequestBody]) -> dict[str, Hint]:
    return {
        name: mark for name, field in body.model_fields.items() for mark in field.metadata if isinstance(mark, Hint)
    }


class ModelRequest(RequestBody):
    model: str | None = None
    """The served name; left out, the served model answers."""


def one_of(body: RequestBody, *fields: str) -> None:
    """Raise `InvalidRequest` unless exactly one of the fields is given."""
    given = [name for name in fields if getattr(body, name) is not None]
    if len(given) != 1:
        message = f"exactly one of {', '.join(fields)} must be given; got {' and '.join(given) or 'none'}"
        raise InvalidRequest(message, param=given[1] if given else fields[0])


class ParsedRequest(Request):
    """A request whose body has been read and validated."""

    ignored_fields: list[str]
    """What the header of the answer names: nothing follows from these fields, or parts of fields."""

    async def prepare(self, work: Work[Result]) -> Result:
        """The result of `work`, which is what needs the body: a large one makes it run off the event loop."""
        return await serving_of(self).preparation.prepare(self, work)

    async def answer(self, work: Work[Any]) -> Response:
        """The result of `work` as JSON."""

        async def encoded() -> bytes:
            return msgspec.json.encode(await work())

        return Response(await self.prepare(encoded), media_type="application/json")


class BodyRoute(APIRoute):
    """A route whose answers, and body where it has one, are validated and encoded here; FastAPI documents them.

    Before a body is read, the engine must be alive; then the model be served that it names.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        response_model: Any = None,
        responses: dict[int | str, dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        hints = get_type_hints(endpoint)
        answer = hints.get("return") if isinstance(response_model, DefaultPlaceholder) else response_model
        described = {status: dict(response) for status, response in (responses or {}).items()}
        if answer not in (Response, NoneType, None):
            described.setdefault(200, {})["model"] = answer
        for response in described.values():
            if model := response.pop("model", None):
                content = {"application/json": {"schema": reference(model)}}
                response["content"] = content | response.get("content", {})
        if body := hints.get("body"):
            content = {"application/json": {"schema": reference(body, "validation")}}
            options["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
            endpoint = self._with_body(endpoint, body, path)
        super().__init__(path, endpoint, response_model=None, responses=described, **options)

    def _with_body(self, endpoint: Callable[..., Any], body_type: type[RequestBody], path: str) -> Callable[..., Any]:
        """An endpoint that reads the body itself: FastAPI finds but its other parameters."""
        parameters = inspect.signature(endpoint).parameters
        own = [name for name in ("body", "request", "serving") if name in parameters]

        async def handle(request: Request, **others: Any) -> Response:
            serving, scope = serving_of(request), request.scope
            record = CURRENT_REQUEST.get()
            record.route = path
            serving.requests.begin_work(record, scope)
            scope[UNTIL_ANSWERED].enter_context(serving.working(scope))
            serving.check_alive()
            body = await parse(request, body_type)
            parsed = ParsedRequest(scope, request.receive)
            parsed.ignored_fields = body.ignored_fields
            serving.check_model(getattr(body, "model", None))
            given = {"body": body, "request": parsed, "serving": serving}
            response: Response = await endpoint(**{name: given[name] for name in own}, **others)
            response.headers.update(ignored_header(parsed.ignored_fields))
            return response

        others = [parameter for name, parameter in parameters.items() if name not in own]
        request = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Request)
        handle.__signature__ = inspect.Signature([request, *others])  # type: ignore[attr-defined]
        handle.__name__, handle.__doc__ = endpoint.__name__, endpoint.__doc__
        return handle


async def parse(request: Request, body_type: type[Body]) -> Body:
    """Raises `InvalidRequest`, or `BodyTooLarge` without reading the rest."""
    serving = serving_of(request)
    data = await _read(request, serving, any_content_type=body_type.any_content_type)

    def validated() -> Body:
        body = validate(data, body_type)
        if serving.config.strict_fields and (unknown := body.unknown_fields):
            raise InvalidRequest(f"unknown field {unknown[0][:64]}", param=unknown[0])
        return body

    if len(data) <= SMALL_BYTES:
        return validated()

    async def work() -> Body:
        return validated()

    return await serving.preparation.run(request, work)


def validate(data: bytes | bytearray, body_type: type[Body]) -> Body:
    """The body of this JSON. Raises `InvalidRequest`."""
    if len(data) > SMALL_BYTES:
        _check_number_of_values(data)
    try:
        if b"NaN" in data or b"Infinity" in data:  # pydantic takes them for numbers
            msgspec.json.decode(data, type=msgspec.Raw)
        return body_type.model_validate_json(data)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}", code="invalid_json") from None
    except ValidationError as error:
        raise invalid_request(error, data) from None


async def _read(request: Request, serving: Serving, *, any_content_type: bool) -> bytearray:
    kind, limit = request.headers.get("content-type", ""), serving.config.max_body_bytes
    if kind and "json" not in kind.lower() and not any_content_type:
        raise InvalidRequest(f"content-type must be application/json; got {kind[:64]}")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit, f"{announced} bytes")
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > limit:
            raise _too_large(limit, "more")
        if len(data) > SMALL_BYTES:
            serving.preparation.hold(request.scope, len(data))
    if OVERDUE in request.scope.get("state", ()):
        timeout = serving.config.request_read_timeout
        raise RequestTimeout(f"the request did not arrive within {timeout:g} s", code="request_timeout")
    return data


def _too_large(limit: int, size: str) -> BodyTooLarge:
    return BodyTooLarge(f"the body may have {limit} bytes; got {size}", code="body_too_large")


def _check_number_of_values(data: bytes | bytearray) -> None:
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


def invalid_request(error: ValidationError, data: bytes | bytearray | None = None) -> InvalidRequest:
    """The error that goes deepest into the body, in one line; `param` is the top-level field."""
    if (count := error.error_count()) > _MAX_ERRORS:
        return InvalidRequest(f"the body has {count} errors")
    details = error.errors(include_url=False, include_input=False)
    if details[0]["type"] == "json_invalid":
        if "recursion limit" in details[0]["msg"]:
            return InvalidRequest("the body is nested too deeply", code="invalid_json")
        return InvalidRequest(f"the body is not JSON: {details[0]['msg']}", code="invalid_json")
    whole = None if data is None else json.loads(data)
    paths = [(_path(one["loc"], whole, is_missing=one["type"] == "missing"), _sentence(one)) for one in details]
    deepest = max((path for path, _ in paths), key=len)
    messages = dict.fromkeys(message for path, message in paths if path == deepest)
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{_name(part)}" for part in deepest).lstrip(".")
    message = f"{place or 'the body'}: {' or '.join(messages)}"
    return InvalidRequest(message, param=str(deepest[0]) if deepest else None)


def invalid_parameter(error: RequestValidationError) -> InvalidRequest:
    """A parameter of the URL's query is wrong: bodies are validated before FastAPI sees them."""
    detail = error.errors()[0]
    name = str(detail["loc"][-1])
    return InvalidRequest(f"{name}: {_sentence(detail)}", param=name)


def _path(places: tuple[int | str, ...], value: Any, *, is_missing: bool) -> tuple[int | str, ...]:
    """pydantic's `loc` without what names the branches of unions: places that are in the body, and what is missing."""
    if is_missing:
        return (*_path(places[:-1], value, is_missing=False), *places[-1:])
    if not places:
        return ()
    rest = _path(places[1:], value, is_missing=False)
    try:
        path = (places[0], *_path(places[1:], value[places[0]], is_missing=False))
    except (TypeError, LookupError):
        return rest
    # a branch may be named as a key beside the wrong one is, as that of {"type": "thinking", "thinking": …}
    return max(path, rest, key=lambda one: (one[-1:] == places[-1:], len(one)))


def _sentence(detail: ErrorDetails) -> str:
    """pydantic's words, without a value that nobody else should read."""
    context = detail.get("ctx", {})
    name = context.get("discriminator", "").strip("'")
    if detail["type"] == "union_tag_not_found":
        return f"has no valid {'type' if name.endswith('()') else name}"
    if detail["type"] == "union_tag_invalid":
        if name.endswith("()"):  # a function tells the branches apart, by their types in the main
            return f"type {shown(context['tag'])} is not supported"
        return f"{name} must be one of {context['expected_tags']}; got {shown(context['tag'])}"
    message = detail["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _name(name: str) -> str:
    """Of a field, or of what somebody else wrote."""
    return name if name.isidentifier() and len(name) < 64 else shown(name)


def ignored_header(names: list[str]) -> dict[str, str]:
    """The response header that names ignored fields: at most 20, escaped for a header line."""
    printable = [_place(name)[:64].encode("ascii", "backslashreplace").decode() for name in names[:20]]
    cleaned = ["".join(letter if letter.isprintable() else "?" for letter in name) for name in printable]
    return {"x-octavo-ignored-fields": ", ".join(cleaned)} if cleaned else {}


def _place(name: str) -> str:
    """`tools[0] web_search`; without the type where that is no name, but any text."""
    place, _, kind = name.partition(" ")
    return name if shown(kind) == repr(kind) else place
