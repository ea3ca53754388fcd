"""What comes before any route: the request's id, the host that it asks, the origin of its page, and the key."""

from starlette.responses import Response
from starlette.types import Scope

from configs.settings import ServerConfig
from server.http_errors import ERROR_BODY
from server.metrics.ledger import RECORD
from server.operation import ANSWER_HEADERS, Operation
from server.routes import messages, ollama
from server.security.hosts import Hosts
from server.security.keys import CHALLENGE, Unauthorized, read_keys
from server.security.origins import Origins, RawHeaders
from server.security.request_ids import CURRENT, HEADER, request_id

ERROR_BODIES = {"/v1/messages": messages.error_body, "/api/": ollama.error_body}
"""Forms of errors by the beginnings of paths, for protocols whose clients read something else than OpenAI's."""


class Guard:
    def __init__(self, config: ServerConfig, operations: list[Operation]) -> None:
        """Raises `SettingsError` for keys that cannot be read."""
        self._keys = read_keys(config)
        self._hosts = Hosts(config, with_keys=bool(self._keys))
        self._origins = Origins(config, with_keys=bool(self._keys))
        of_path = {path: operation for operation in operations for path in operation.paths.split()}
        self._open = {path for path, operation in of_path.items() if operation.is_open}
        if config.metrics_without_key:
            self._open.add("/metrics")

    def admit(self, scope: Scope) -> Response | None:
        """None lets the request pass; else the answer to it, a preflight. Raises `RequestError` to refuse it.

        Puts the request's id, and what its answer needs, into the scope first.
        """
        headers = dict(scope["headers"])
        name = request_id(headers.get(HEADER))
        CURRENT.set(name)
        added: RawHeaders = [(HEADER, name.encode()), *self._origins.answer_headers(headers)]
        scope[ANSWER_HEADERS] = added
        for prefix, error_body in ERROR_BODIES.items():
            if scope["path"].startswith(prefix):
                scope[ERROR_BODY] = error_body
        preflight = self._origins.preflight(scope["method"], headers)
        if preflight is None and scope["path"] not in self._open:
            self._hosts.refuse_foreign(headers)
            self._origins.refuse_foreign(headers)
            try:
                scope[RECORD].owner = self._keys.check(headers)
            except Unauthorized:
                added.append(CHALLENGE)
                raise
        return preflight
