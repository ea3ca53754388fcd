"""What surrounds every route: the path's form, the request's id and record, who may ask, and errors as answers."""

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Iterable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from configs.errors import InvalidRequest
from configs.settings import ServerConfig
from server.bodies import UNTIL_ANSWERED
from server.errors import error_response
from server.metrics.records import CURRENT_REQUEST, RequestRecord
from server.security import Origins, RawHeaders, check_head, read_keys
from server.serving import Serving
from server.sse import SEND

METHOD = "octavo.method"
"""Key in the scope: the method that was sent; HEAD is routed as GET, and loses its body in uvicorn."""
REQUEST_ID = b"x-request-id"
_SAFE_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
OPEN = frozenset(("/", "/docs", "/openapi.json", "/health", "/health/ready", "/health/live", "/ping"))
"""Paths that need no key."""
_OPEN_FOLDER = "/page/"


class RequestMiddleware:
    """One ASGI layer. Raises nothing but what ends the task."""

    def __init__(self, app: ASGIApp, serving: Serving, admission: "Admission", paths: "Paths") -> None:
        self.app = app
        self.serving = serving
        self.admission = admission
        self.paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = self.paths.canonical(scope["path"])
        scope = {**scope, METHOD: scope["method"], SEND: send, "path": path}
        added: RawHeaders = []
        requests = self.serving.requests
        with requests.track(scope) as record, contextlib.ExitStack() as scope[UNTIL_ANSWERED]:
            if scope["method"] == "HEAD":
                scope["method"] = "GET"
            send_with_headers = self._sender(scope, record, added, send)
            try:
                response = self.admission.admit(scope, added)
                await (response or self.app)(scope, receive, send_with_headers)
                return
            except ClientDisconnect:  # with half its request sent
                return
            except asyncio.CancelledError:  # at the server's end, with half its request read or prepared
                if record.status or self.serving.drained_by is None:
                    raise
                error: Exception = self.serving.shutting_down()
            except RecursionError:  # going through what a body nests
                error = InvalidRequest("the body is nested too deeply")
            except Exception as failure:
                error = failure
            response = error_response(Request(scope), error)
            requests.note_error(record, error, response.status_code)
            await response(scope, receive, send_with_headers)

    def _sender(self, scope: Scope, record: RequestRecord, added: RawHeaders, send: Send) -> Send:
        """`send`, which adds headers to an answer's head and notes its status and end in the request's record."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if (route := scope.get("route")) is not None:
                    record.route = route.path_format
                elif scope["path"].startswith(_OPEN_FOLDER):
                    record.route = _OPEN_FOLDER + "{file}"
                is_whole = any(name == b"content-length" for name, _ in message["headers"])
                if is_whole and (timing := record.server_timing(time.monotonic())):
                    added.append((b"server-timing", timing))
                message["headers"] = [*message["headers"], *added]
            elif not message.get("more_body", False):
                self.serving.requests.free_id(record)
            await send(message)

        return send_with_headers


class Admission:
    """What comes before any route: the request's id and head, the host that it asks, its page's origin, and the key."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises `SettingsError` for keys that cannot be read."""
        self._config = config
        self._keys = read_keys(config)
        self._origins = Origins(config, with_keys=bool(self._keys))
        self._open = OPEN | {"/metrics"} if config.metrics_without_key else OPEN

    def admit(self, scope: Scope, added: RawHeaders) -> ASGIApp | None:
        """None lets the request pass; else the answer to it, a preflight. Raises `RequestError` to refuse it.

        `added` gets the headers that its answer has to carry in any case.
        """
        headers, record = dict(scope["headers"]), CURRENT_REQUEST.get()
        record.request_id = request_id(headers.get(REQUEST_ID))
        added += [(REQUEST_ID, record.request_id.encode()), *self._origins.answer_headers(headers)]
        check_head(scope, self._config)
        if scope["method"] == "OPTIONS" and {b"origin", b"access-control-request-method"} <= headers.keys():
            return Response(status_code=204, headers=self._origins.preflight_headers(headers))
        if scope["path"] not in self._open and not scope["path"].startswith(_OPEN_FOLDER):
            self._origins.check(headers)
            record.owner = self._keys.check(headers)
        return None


def request_id(given: bytes | None = None) -> str:
    """The client's own id of a request, unless it could do harm where it is printed; else a new one."""
    return given.decode() if given and _SAFE_ID.fullmatch(given) else os.urandom(16).hex()


class Paths:
    """Brings what clients write into the form that the routes have, before anything looks at a path.

    A slash at the end means nothing, and neither does `/v1` in front: some clients leave it out of their base URL, and
    some add it to one that has it.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        paths = list(paths)
        self._known = {path for path in paths if "{" not in path}
        self._beginnings = tuple(path.partition("{")[0] for path in paths if "{" in path)

    def canonical(self, path: str) -> str:
        """A path that no route has stays as it is but for its end."""
        if path in self._known:
            return path
        path = path.rstrip("/") or "/"
        for one in (path, "/v1" + path, path.removeprefix("/v1")):
            if one in self._known or one.startswith(self._beginnings):
                return one
        return path
