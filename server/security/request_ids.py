"""Every request has an id, the client's own or one of ours: in its answer, and in the lines that are logged of it."""

import os
import re
from contextvars import ContextVar

HEADER = b"x-request-id"
_SANE = re.compile(rb"[A-Za-z0-9._-]{1,128}")

CURRENT: ContextVar[str] = ContextVar("request_id", default="-")
"""Of the request that is being answered."""


def request_id(given: bytes | None) -> str:
    """`given` unless it could do harm where it is printed."""
    return given.decode() if given and _SANE.fullmatch(given) else os.urandom(16).hex()
