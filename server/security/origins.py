"""Which web pages may use the server: cross-origin resource sharing, https://fetch.spec.whatwg.org/#http-cors-protocol,
and the names by which browsers may reach it.

Starlette's CORSMiddleware tells also foreign pages the exposed headers, answers their preflights in plain text with the
methods that are allowed, and knows nothing of requests that browsers send without a preflight; its
TrustedHostMiddleware knows names, but no addresses.
"""

import ipaddress
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from configs.errors import RequestError
from configs.settings import ServerConfig
from server.security.keys import is_reachable

METHODS = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
EXPOSED = (
    b"x-request-id, retry-after, server-timing,"
    b" x-octavo-ignored-fields, x-octavo-dropped-messages, x-octavo-prompt-cut-to"
)
MAX_AGE = "600"
"""Seconds for which browsers keep the answer to a preflight."""
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_INSTALLED = (
    *("app://", "capacitor://", "file://", "tauri://", "vscode-file://", "vscode-webview://"),
    *("chrome-extension://", "moz-extension://", "safari-web-extension://"),
)
"""Of programs and extensions that somebody has installed; no page from the network has such an origin."""
_PRIVATE = (".localhost", ".local", ".internal")
"""Endings of names that no domain on the internet has."""

RawHeaders = list[tuple[bytes, bytes]]


class Forbidden(RequestError):
    status = 403  # for foreign hosts as Ollama: a 421 would let a client try once more
    type = "invalid_request_error"


class Origins:
    def __init__(self, config: ServerConfig, *, with_keys: bool) -> None:
        """With keys, all pages are allowed unless the settings say otherwise: they can do nothing without a key."""
        self._allowed, self._with_keys = config.allowed_origins, with_keys
        self._allows_all = with_keys if self._allowed is None else "*" in self._allowed
        self._depends = not self._allows_all or config.allow_credentials
        """Whether answers differ by origin."""
        self._readable: RawHeaders = [(b"access-control-expose-headers", EXPOSED)]
        if config.allow_credentials:
            self._readable.append((b"access-control-allow-credentials", b"true"))
        self._methods, self._headers = _listed(config.allowed_methods), _listed(config.allowed_headers)
        is_reached_by_any_name = with_keys or config.uds is not None or is_reachable(config.host)
        self._checks_host = not is_reached_by_any_name and "*" not in (self._allowed or ())
        self._hosts = {socket.gethostname().lower(), *map(_host, self._allowed or ())}

    def answer_headers(self, headers: Mapping[bytes, bytes]) -> RawHeaders:
        """What every answer carries, so that an allowed page may read it."""
        origin = headers.get(b"origin")
        vary = [(b"vary", b"Origin")] if self._depends else []  # also without an origin: caches must not mix them up
        if origin is None or not self._allows(origin):
            return vary
        return [(b"access-control-allow-origin", origin if self._depends else b"*"), *self._readable, *vary]

    def preflight_headers(self, headers: Mapping[bytes, bytes]) -> dict[str, str]:
        """What the answer to a preflight says beside `answer_headers`. Raises `Forbidden`."""
        self._check_origin(headers)
        asked = headers.get(b"access-control-request-headers", b"").decode("latin-1")
        return {
            "access-control-allow-methods": METHODS if self._methods is None else self._methods,
            "access-control-allow-headers": asked if self._headers is None else self._headers,
            "access-control-max-age": MAX_AGE,
        }

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise `Forbidden` for what a page that is not allowed sends, where no key would stop it.

        The owner of a domain can let its name point to 127.0.0.1 while a page of it is open (DNS rebinding): the
        browser then takes the server for that page's own. Such requests bear the domain's name as their host.
        """
        if self._checks_host and not self._is_own(headers.get(b"host", b"").decode("latin-1")):
            raise Forbidden(
                "this server answers to names of this machine alone; see --allowed-origins", code="host_not_allowed"
            )
        if not self._with_keys and _is_foreign(headers):
            self._check_origin(headers)

    def _check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        if not self._allows(headers[b"origin"]):
            message = "pages of this origin may not use the server; see --allowed-origins"
            raise Forbidden(message, code="origin_not_allowed")

    def _allows(self, raw: bytes) -> bool:
        """Without settings, pages of this machine; not `null`, which is the origin of sandboxed frames of any page."""
        origin = raw.decode("latin-1")
        if self._allows_all or self._allowed is not None:
            return self._allows_all or origin in (self._allowed or ())
        host = _host(origin)
        return origin.startswith(_INSTALLED) or host in _THIS_MACHINE or host.endswith(".localhost")

    def _is_own(self, host: str) -> bool:
        name = _host(f"//{host}")
        if "." not in name or name.endswith(_PRIVATE) or name in self._hosts:  # without a dot: no domain's
            return True
        try:
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def _is_foreign(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser sends this for a page of another origin, other than by following a link."""
    origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
    if origin is None or site is not None:
        return origin is not None and site != b"same-origin"
    return origin.partition(b"://")[2] != headers.get(b"host")


def _host(url: str) -> str:
    """Without port, brackets and the dot at the end; a dot for what is no host."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return "."


def _listed(names: tuple[str, ...] | None) -> str | None:
    """None for all."""
    return None if names is None or "*" in names else ", ".join(names)
