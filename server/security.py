"""Who may use the server: API keys, certificates, and which web pages, by cross-origin resource sharing,
https://fetch.spec.whatwg.org/#http-cors-protocol, and by the names that browsers reach it by.

Starlette's CORSMiddleware tells also foreign pages the exposed headers, answers their preflights in plain text with the
methods that are allowed, and knows nothing of requests that browsers send without a preflight; its
TrustedHostMiddleware knows names, but no addresses.
"""

import functools
import hashlib
import hmac
import ipaddress
import itertools
import os
import socket
import ssl
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from configs.errors import InvalidRequest, RequestError, SettingsError
from configs.settings import ServerConfig

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


class Unauthorized(RequestError):
    status = 401
    type = "invalid_request_error"  # as OpenAI names it


class Forbidden(RequestError):
    status = 403  # for foreign hosts as Ollama: a 421 would let a client try once more
    type = "invalid_request_error"


class HeaderTooLarge(RequestError):
    status = 431
    type = "invalid_request_error"
    ends_connection = True


def check_head(scope: Mapping[str, Any], config: ServerConfig) -> None:
    """Raises `RequestError` where the target and headers of a request are beyond bounds, or no HTTP."""
    headers, names = scope["headers"], [name for name, _ in scope["headers"]]
    if len(names) > config.max_header_count:
        message = f"a request may have {config.max_header_count} headers; this one has {len(names)}"
        raise HeaderTooLarge(message, code="too_many_headers")
    target = len(scope["raw_path"]) + len(scope["query_string"])
    if target + sum(map(len, itertools.chain.from_iterable(headers))) > config.max_header_bytes:
        message = f"a request's target and headers may have {config.max_header_bytes} bytes"
        raise HeaderTooLarge(message, code="header_too_large")
    if scope["http_version"] not in ("1.1", "1.0"):
        raise InvalidRequest("a request must have version 1.1 or 1.0 of HTTP", code="invalid_http")
    num_hosts = names.count(b"host")
    if num_hosts > 1 or (not num_hosts and scope["http_version"] != "1.0"):  # as RFC 9112, 3.2, asks
        raise InvalidRequest("a request must have one header Host", code="invalid_http")


class ApiKeys:
    """Those that are accepted; without any, everybody is."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._secret = os.urandom(32)
        self._digests = [self._digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, headers: Mapping[bytes, bytes]) -> str:
        """The owner of what the request makes: 16 letters of its key's digest; empty without keys.

        Raises `Unauthorized` unless the headers bring a key. How long it takes tells nothing of the keys.
        """
        if not self:
            return ""
        given = [self._digest(key) for key in _given(headers)]
        accepted = [one for one in given if sum([hmac.compare_digest(one, known) for known in self._digests])]
        if not accepted:
            how = "send an API key as `Authorization: Bearer KEY`, or as `x-api-key: KEY`"
            message = f"the API key is not accepted; {how}" if given else how
            raise Unauthorized(message, code="invalid_api_key")
        return accepted[0].hex()[:16]

    def _digest(self, key: bytes) -> bytes:
        """Of equal length for all keys, as a comparison in constant time needs it; other processes have another."""
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()


def read_keys(config: ServerConfig) -> ApiKeys:
    """The keys of the settings and of the file that they name. Raises `SettingsError`, which quotes no key."""
    sources = {"api_key": list(config.api_key or ())}
    if config.api_key_file is not None:
        where = f"--api-key-file {config.api_key_file}"
        sources[where] = _lines(Path(config.api_key_file), where)
    for where, keys in sources.items():
        for number, key in enumerate(keys, start=1):
            if not (key.isascii() and key.isprintable() and " " not in key):
                raise SettingsError(f"{where}: key number {number} has a character that no header can carry")
    return ApiKeys(key for keys in sources.values() for key in keys)


def _lines(path: Path, where: str) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text in UTF-8"
        raise SettingsError(f"{where}: {reason}") from None  # a UnicodeDecodeError holds the text
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise SettingsError(f"{where}: holds no key; write one a line")
    return keys


def _given(headers: Mapping[bytes, bytes]) -> Iterator[bytes]:
    for name in (b"x-api-key", b"api-key"):  # Anthropic's clients, and Azure's
        if name in headers:
            yield headers[name].strip()
    scheme, _, value = headers.get(b"authorization", b"").strip().partition(b" ")
    if scheme.lower() == b"bearer":
        yield value.strip()


def check_security(config: ServerConfig) -> str | None:
    """A warning, where there is reason for one. Raises `SettingsError` for keys and certificates that are of no use."""
    check_certificates(config)
    if read_keys(config) or config.uds or not is_reachable(config.host):
        return None
    return (
        f"everybody who can reach {config.host} can use this server, as it has no API key:"
        " --api-key-file or OCTAVO_API_KEY sets one"
    )


def is_reachable(host: str) -> bool:
    """Whether other machines may reach an address. A name may, as where it points to may change."""
    address = _address(host)
    return host != "localhost" and not (address is not None and address.is_loopback)


@functools.lru_cache
def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def check_certificates(config: ServerConfig) -> None:
    """Raises `SettingsError` for files that cannot be used, or would be for nothing, before a model is loaded."""
    certificate, key, authorities = config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs
    if certificate is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(config, name):
                raise SettingsError(f"--{name.replace('_', '-')} needs a certificate: give --ssl-certfile too")
        return
    if config.ssl_cert_reqs and authorities is None:
        raise SettingsError("--ssl-cert-reqs needs --ssl-ca-certs, the certificates of those who sign clients'")
    for flag, file in (("ssl-certfile", certificate), ("ssl-keyfile", key), ("ssl-ca-certs", authorities)):
        try:  # `ssl` does not say which file it could not read
            Path(file or os.devnull).open("rb").close()
        except OSError as error:
            raise SettingsError(f"--{flag} {file}: {error.strerror}") from error
    files = f"--ssl-certfile {certificate}" + (f", --ssl-keyfile {key}" if key else "")

    def no_password() -> str:  # instead of a question on the terminal, where a server may have none
        raise SettingsError(f"{files}: the key is encrypted; `openssl pkey` writes it without")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=no_password)
    except ssl.SSLError as error:
        is_other = error.reason == "KEY_VALUES_MISMATCH"
        reason = (
            "the key belongs to another certificate" if is_other else "no certificate with its private key in PEM form"
        )
        raise SettingsError(f"{files}: {reason}") from error
    try:
        if authorities is not None:
            context.load_verify_locations(authorities)
    except ssl.SSLError as error:
        raise SettingsError(f"--ssl-ca-certs {authorities}: no certificates in PEM form") from error


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
        name = _host(f"//{host}")  # without a dot it is no domain's
        return "." not in name or name.endswith(_PRIVATE) or name in self._hosts or _address(name) is not None


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
