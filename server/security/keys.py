"""API keys, and what is checked of security before a model is loaded, which may take long."""

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from configs.errors import RequestError, SettingsError
from configs.settings import ServerConfig
from server.security.tls import check_certificates


class Unauthorized(RequestError):
    status = 401
    type = "invalid_request_error"  # as OpenAI names it


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
    """Whether other machines may reach an address."""
    try:
        return host != "localhost" and not ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: where it points to may change
        return True
