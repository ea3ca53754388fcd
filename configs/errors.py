"""Every error that Octavo raises on purpose.

OctavoError
├── UsageError              the person who starts Octavo can mend it: one line on the command line
│   ├── SettingsError           a flag, variable or TOML key
│   └── CheckpointError         a missing, cut, superfluous or unsupported part of a checkpoint
└── RequestError            one request ends with it; the server lives on
    ├── InvalidRequest          400: the client's fault, `param` names the field
    │   └── ContextLengthExceeded
    ├── ModelNotFound           404
    ├── RequestFailed           500: the model gave no usable answer for this request
    └── EngineDead              503: the core process is gone
"""


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

    `param` names the offending field of the request, `code` is OpenAI's machine-readable code.
    """

    status = 500
    type = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
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


class EngineDead(RequestError):
    """The core process has ended; nothing can be served."""

    status = 503

    def __init__(self, message: str = "the engine has stopped; see the server's log") -> None:
        super().__init__(message, code="engine_dead")
