"""Which names the server answers to, where only this machine reaches it and nobody needs a key.

The owner of a domain can let its name point to 127.0.0.1 while a page of it is open (DNS rebinding): the browser then
takes the server for that page's own, and lets the page read everything. Such requests bear the domain's name.
"""

import ipaddress
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from configs.errors import RequestError
from configs.settings import ServerConfig

_PRIVATE = (".localhost", ".local", ".internal")
"""Endings of names that no domain on the internet has."""


class ForeignHost(RequestError):
    status = 403  # as Ollama; a 421 would let a client try once more
    type = "invalid_request_error"

    def __init__(self) -> None:
        super().__init__(
            "this server answers to names of this machine alone; see --allowed-origins", code="host_not_allowed"
        )


class Hosts:
    def __init__(self, config: ServerConfig, *, with_keys: bool) -> None:
        origins = config.allowed_origins or ()
        self._answers_to_all = with_keys or config.uds is not None or is_reachable(config.host) or "*" in origins
        self._names = {socket.gethostname().lower(), *map(_name, (one.partition("://")[2] for one in origins))}

    def refuse_foreign(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise `ForeignHost` for a name that may be anybody's."""
        if not self._answers_to_all and b"host" in headers and not self._is_own(headers[b"host"].decode("latin-1")):
            raise ForeignHost()

    def _is_own(self, host: str) -> bool:
        name = _name(host)
        if "." not in name or name.endswith(_PRIVATE) or name in self._names:  # without a dot: no domain's
            return True
        return _is_address(name)


def _name(host: str) -> str:
    """Without port, brackets and the dot at the end; a dot for what is no host."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return "."


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_reachable(host: str) -> bool:
    """Whether other machines may reach an address."""
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: where it points to may change
        return True
