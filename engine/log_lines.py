"""The form of what is logged, the same in both processes: lines for people, or a JSON object each. Imports no torch."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, TextIO

from configs.errors import printable

_ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
LogFormat = Literal["console", "json"]
NO_ID = "-"


def configure(level: str, form: LogFormat, process: str, request_id: Callable[[], str] = lambda: NO_ID) -> None:
    """Log to standard error from `level` on. `request_id` gives that of the request that is being answered."""
    handler = StandardError()
    handler.setFormatter(JsonLines(process, request_id) if form == "json" else ConsoleLines(request_id))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if form == "json":
        os.environ["TQDM_DISABLE"] = "1"  # no bars between the lines
    sys.excepthook = lambda *error: logging.critical("the process ends", exc_info=error)


class StandardError(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is when a line is logged, which need not be what it was at the start."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class ConsoleLines(logging.Formatter):
    """`fields`, given as `extra`, stand behind the message. Each record begins one line, whatever it quotes; what else
    belongs to it is indented."""

    def __init__(self, request_id: Callable[[], str]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._request_id = request_id

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # which may be of another form
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record).strip()
        shown = _fields(record, self._request_id())
        return printable(" ".join([line, *(f"{name}={_quoted(str(value))}" for name, value in shown.items())]))

    def formatException(self, ei: _ExceptionInfo) -> str:
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(stack_info)


class JsonLines(logging.Formatter):
    def __init__(self, process: str, request_id: Callable[[], str]) -> None:
        super().__init__()
        self._process = process
        self._request_id = request_id

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record, self._request_id()),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str).replace("\x7f", "\\u007f")  # all else that is not seen is escaped


def _indented(text: str) -> str:
    return "\n".join("    " + printable(line) for line in text.splitlines())


def _quoted(value: str) -> str:
    """`value`, so that no part of it looks like another field."""
    return json.dumps(value, ensure_ascii=False) if not value or set(value) & set(' "=') else value


def _fields(record: logging.LogRecord, request_id: str) -> dict[str, Any]:
    name = {} if request_id == NO_ID else {"request_id": request_id}
    return name | getattr(record, "fields", {})
