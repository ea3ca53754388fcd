"""Which web pages may use the server: cross-origin resource sharing, https://fetch.spec.whatwg.org/#http-cors-protocol.

A browser asks (a preflight) before it sends most requests of another origin's page, and hides every answer that does
not allow the origin. What it sends without asking has to be told here, see `refuse_foreign`.
"""

from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.responses import Response

from configs.errors import RequestError
from configs.settings import ServerConfig

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
EXPOSED = ", ".join(
    (
        *("x-request-id", "retry-after", "server-timing"),
        *("x-octavo-ignored-fields", "x-octavo-dropped-messages", "x-octavo-prompt-cut-to"),
    )
)
MAX_AGE = "600"
"""Seconds for which browsers keep the answer to a preflight."""
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_INSTALLED = (
    *("app", "capacitor", "file", "tauri", "vscode-file", "vscode-webview"),
    *("chrome-extension", "moz-extension", "safari-web-extension"),
)
"""Schemes of programs and extensions that somebody has installed; no page from the network has such an origin."""

RawHeaders = list[tuple[bytes, bytes]]


class ForeignOrigin(RequestError):
    status = 403
    type = "invalid_request_error"

    def __init__(self) -> None:
        super().__init__(
            "pages of this origin may not use the server; see --allowed-origins", code="origin_not_allowed"
        )


class Origins:
    def __init__(self, config: ServerConfig, *, with_keys: bool) -> None:
        """With keys, all pages are allowed unless the settings say otherwise: they can do nothing without a key."""
        self._allowed = config.allowed_origins
        self._allows_all = "*" in self._allowed if self._allowed is not None else with_keys
        self._with_keys = with_keys
        self._credentials = config.allow_credentials
        self._methods = _listed(config.allowed_methods, METHODS)
        self._headers = config.allowed_headers

    def preflight(self, method: str, headers: Mapping[bytes, bytes]) -> Response | None:
        """The answer to a preflight; None for other requests. Raises `ForeignOrigin`."""
        if method != "OPTIONS" or b"origin" not in headers or b"access-control-request-method" not in headers:
            return None
        if not self._allows(headers[b"origin"].decode("latin-1")):
            raise ForeignOrigin()
        asked = headers.get(b"access-control-request-headers", b"").decode("latin-1")
        allowed = {
            "access-control-allow-methods": self._methods,
            "access-control-allow-headers": _listed(self._headers, (asked,)),
            "access-control-max-age": MAX_AGE,
        }
        return Response(status_code=204, headers=allowed)

    def answer_headers(self, headers: Mapping[bytes, bytes]) -> RawHeaders:
        """What every answer carries, so that the page may read it."""
        origin = headers.get(b"origin")
        depends = not self._allows_all or self._credentials
        vary = [(b"vary", b"Origin")] if depends else []  # also without an origin: caches must not mix them up
        if origin is None or not self._allows(origin.decode("latin-1")):
            return vary
        added = [(b"access-control-allow-origin", origin if depends else b"*")]
        added += [(b"access-control-expose-headers", EXPOSED.encode())]
        if self._credentials:
            added += [(b"access-control-allow-credentials", b"true")]
        return added + vary

    def refuse_foreign(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise `ForeignOrigin` for what a page that is not allowed sends, where no key would stop it."""
        if not self._with_keys and is_foreign(headers) and not self._allows(headers[b"origin"].decode("latin-1")):
            raise ForeignOrigin()

    def _allows(self, origin: str) -> bool:
        if self._allows_all:
            return True
        return _is_local(origin) if self._allowed is None else origin in self._allowed


def is_foreign(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser sends this for a page of another origin, other than by following a link."""
    origin = headers.get(b"origin")
    if origin is None:
        return False
    site = headers.get(b"sec-fetch-site")
    return origin.partition(b"://")[2] != headers.get(b"host") if site is None else site != b"same-origin"


def _is_local(origin: str) -> bool:
    """Not `null`: frames that are kept apart have that origin, whichever page they are in."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    host = parts.hostname or ""
    return parts.scheme in _INSTALLED or host in _THIS_MACHINE or host.endswith(".localhost")


def _listed(given: tuple[str, ...] | None, otherwise: tuple[str, ...]) -> str:
    return ", ".join(otherwise if given is None or "*" in given else given)
