"""Every error that Octavo raises on purpose.

OctavoError
├── UsageError              the person who starts Octavo can mend it: one line on the command line
│   ├── SettingsError           a flag, variable or TOML key
│   └── CheckpointError         a missing, cut, superfluous or unsupported part of a checkpoint
└── RequestError            one request ends with it; the server lives on
    ├── InvalidRequest          400: the client's fault, `param` names the field
    │   └── ContextLengthExceeded
    ├── ModelNotFound           404
    ├── DeadlinePassed          408: no answer in time, and no part of one that would be of use
    ├── QueueFull               429: too much waits already
    ├── RequestFailed           500: the model gave no usable answer for this request
    └── Unavailable             503: not now
        ├── EngineDead              the core process has ended, and the request with it
        ├── CompilerBusy            other requests' grammars take its time
        └── ShuttingDown            the server takes no more work
"""

import re

MAX_MESSAGE = 1000
"""Characters of a message to a client, which may quote what the client sent, and others' words."""
MAX_PARAM = 200
_NAME = re.compile(r"[\w.:/+@$-]{1,64}", re.ASCII)


def shown(value: object) -> str:
    """`value` as an error quotes it: as it is where it may be a name or a number. Others may be secret, or long."""
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 2**64):
        return repr(value)
    if isinstance(value, str):
        return repr(value) if _NAME.fullmatch(value) or not value else f"a text of {len(value)} characters"
    return "an object" if isinstance(value, dict) else f"a {type(value).__name__}"


def bounded(text: str, limit: int = MAX_MESSAGE) -> str:
    """`text`, or its beginning."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def printable(text: str) -> str:
    """`text` in one line that neither looks like several nor steers a terminal: all that is not plainly seen escaped,
    such as line breaks, control characters and marks that turn the direction of writing."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class OctavoError(Exception):
    """Root of the tree."""


class UsageError(OctavoError):
    """Start-up cannot go on; the message says what to change."""


class SettingsError(UsageError):
    """A setting is unknown, malformed or out of range."""


class CheckpointError(UsageError):
    """A checkpoint cannot be served; the message names the file and, where there is one, the tensor."""


class RequestError(OctavoError):
    """One request fails.

    `param` names the offending field of the request, `code` is OpenAI's machine-readable code, `retry_after` the
    seconds after which the same request may fare better.
    """

    status = 500
    type = "server_error"
    retry_after: int | None = None
    ends_connection = False
    """Whether the client is told that its connection closes behind the answer."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.message = bounded(message)
        super().__init__(self.message)
        self.param = param if param is None else bounded(param, MAX_PARAM)
        self.code = code


class InvalidRequest(RequestError):
    """The request cannot be honoured as it stands."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested output do not fit the model's context (or the KV cache)."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class ModelNotFound(RequestError):
    """No model of that name is served."""

    status = 404
    type = "invalid_request_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model", code="model_not_found")


class RequestFailed(RequestError):
    """The engine gave this request up, for example because its logits were not numbers."""


class DeadlinePassed(RequestError):
    """The request's time was over before its answer was whole; for answers of which a part is of no use."""

    status = 408
    type = "timeout_error"

    def __init__(self, message: str = "the request's time is over") -> None:
        super().__init__(message, code="timeout")


class QueueFull(RequestError):
    """More requests or tokens wait for their turn than the server lets wait."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message, code="queue_full")
        self.retry_after = retry_after


class Unavailable(RequestError):
    """The server cannot answer now; `code` says why."""

    status = 503

    def __init__(self, message: str, *, code: str = "unavailable", retry_after: int | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class EngineDead(Unavailable):
    """The core process has ended: what it was at is lost."""

    def __init__(
        self, message: str = "the engine has stopped; see the server's log", *, retry_after: int | None = None
    ) -> None:
        super().__init__(message, code="engine_dead", retry_after=retry_after)


class CompilerBusy(Unavailable):
    """Grammars of other requests take long to compile."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, code="compiler_busy", retry_after=5)
        self.param = param


class ShuttingDown(Unavailable):
    """The server finishes what runs, and then ends."""

    ends_connection = True

    def __init__(self, *, retry_after: int) -> None:
        super().__init__("the server is shutting down", code="shutting_down", retry_after=retry_after)
