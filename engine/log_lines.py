"""The form of what is logged, the same in both processes: lines for people, or a JSON object each. Imports no torch."""

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

LogFormat = Literal["console", "json"]
NO_ID = "-"


def configure(level: str, form: LogFormat, process: str, request_id: Callable[[], str] = lambda: NO_ID) -> None:
    """Log to standard error from `level` on. `request_id` gives that of the request that is being answered."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(process, request_id) if form == "json" else ConsoleLines(request_id))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if form == "json":
        os.environ["TQDM_DISABLE"] = "1"  # no bars between the lines
    sys.excepthook = lambda *error: logging.critical("the process ends", exc_info=error)


class ConsoleLines(logging.Formatter):
    """`fields`, given as `extra`, stand behind the message."""

    def __init__(self, request_id: Callable[[], str]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._request_id = request_id

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        shown = _fields(record, self._request_id())
        return " ".join([line, *(f"{name}={value}" for name, value in shown.items())])


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
        return msgspec.json.encode(line, enc_hook=str).decode()


def _fields(record: logging.LogRecord, request_id: str) -> dict[str, Any]:
    name = {} if request_id == NO_ID else {"request_id": request_id}
    return name | getattr(record, "fields", {})
