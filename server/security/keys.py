"""API keys."""

import hashlib
import hmac
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from configs.errors import RequestError, SettingsError
from configs.settings import ServerConfig


class Unauthorized(RequestError):
    status = 401
    type = "invalid_request_error"  # as OpenAI names it

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")


class ApiKeys:
    """Those that are accepted; without any, everybody is."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]
        self._secret = os.urandom(32)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, headers: Mapping[bytes, bytes]) -> str:
        """The owner of what the request makes: a digest of its key, which other processes do not know; empty without
        keys. Raises `Unauthorized` unless the headers bring a key. How long it takes tells nothing of the keys."""
        if not self:
            return ""
        given = list(_given(headers))
        accepted = [key for key in given if self._accepts(key)]
        if not accepted:
            how = "send an API key as `Authorization: Bearer KEY`, or as `x-api-key: KEY`"
            raise Unauthorized(f"the API key is not accepted; {how}" if given else how)
        return hashlib.blake2b(accepted[0], key=self._secret, digest_size=8).hexdigest()

    def _accepts(self, key: bytes) -> bool:
        digest = _digest(key)
        return sum([hmac.compare_digest(digest, known) for known in self._digests]) > 0


def read_keys(config: ServerConfig) -> ApiKeys:
    """Raises `SettingsError`, which quotes no key."""
    keys = [*(config.api_key or ())]
    _check(keys, "api_key")
    if config.api_key_file is not None:
        keys += _read_file(Path(config.api_key_file))
    return ApiKeys(keys)


def _read_file(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise SettingsError(f"--api-key-file {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise SettingsError(f"--api-key-file {path}: not a text in UTF-8") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise SettingsError(f"--api-key-file {path}: holds no key; write one a line")
    _check(keys, f"--api-key-file {path}")
    return keys


def _check(keys: list[str], where: str) -> None:
    for number, key in enumerate(keys, start=1):
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise SettingsError(f"{where}: key number {number} has a character that no header can carry")


def _given(headers: Mapping[bytes, bytes]) -> Iterator[bytes]:
    for name in (b"x-api-key", b"api-key"):  # Anthropic's clients, and Azure's
        if name in headers:
            yield headers[name].strip()
    scheme, _, value = headers.get(b"authorization", b"").strip().partition(b" ")
    if scheme.lower() == b"bearer":
        yield value.strip()


def _digest(key: bytes) -> bytes:
    """Of equal length for all keys, as a comparison in constant time needs it."""
    return hashlib.sha256(key).digest()
