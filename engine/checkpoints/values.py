"""Entries of a checkpoint's configuration: anybody may have written them, so each is of its type and in its bounds, or
refused by file and key."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.errors import CheckpointError

MAX_CONTEXT = 2**24
"""Tokens: up to there float32 tells positions apart."""
MAX_LAYERS = 10_000
MAX_SIZE = 2**31 - 1
_MAX_SHOWN = 80


class Values:
    """Numbers of a configuration. A null counts as left out. Every method raises CheckpointError."""

    is_gguf = False
    """Whether they are metadata of a GGUF file."""

    def __init__(
        self, file: Path, entries: Mapping[str, Any], prefix: str = "", own_names: Mapping[str, str] | None = None
    ) -> None:
        """`prefix` stands before each key in the file; `own_names` are the keys that the file calls otherwise."""
        self.file = file
        self._entries = {key: value for key, value in entries.items() if value is not None}
        self.prefix = prefix
        self._own_names = own_names or {}
        self._asked: set[str] = set()
        self._sections: dict[str, Values] = {}

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """As it is in the file."""
        own = self._own_names.get(key, key)
        self._asked.add(own)
        return self._entries.get(own, default)

    def name(self, key: str) -> str:
        """The key as it is in the file, with its prefix."""
        return f"{self.prefix}{self._own_names.get(key, key)}"

    def section(self, key: str) -> "Values":
        """The values of the object `key`; empty where it is left out."""
        if key not in self._sections:
            self._sections[key] = Values(self.file, self.mapping(key), f"{self.name(key)}.")
        return self._sections[key]

    def not_asked(self) -> dict[str, Any]:
        """Entries that nobody has looked at, by the file's own names without the prefix; of sections with theirs."""
        found = {key: value for key, value in self._entries.items() if key not in self._asked}
        for section in self._sections.values():
            found |= {section.prefix + key: value for key, value in section.not_asked().items()}
        return found

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most or value % 1:
            raise self.refusal(key, f"a whole number from {least} to {most} is needed")
        return int(value)

    def number(self, key: str, default: float | None = None, *, least: float = 0.0, most: float = 1e6) -> float:
        value = self._given(key, default)
        if not _is_number(value, least, most):
            raise self.refusal(key, f"a number from {least:g} to {most:g} is needed")
        return float(value)

    def numbers(self, key: str, length: int, *, least: float, most: float) -> list[float]:
        values = self._given(key, None)
        if not isinstance(values, list) or len(values) != length or not all(_is_number(x, least, most) for x in values):
            raise self.refusal(key, f"a list of {length} numbers from {least:g} to {most:g} is needed")
        return [float(value) for value in values]

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._given(key, default)
        if value not in (True, False):
            raise self.refusal(key, "true or false is needed")
        return bool(value)

    def mapping(self, key: str) -> dict[str, Any]:
        """{} where it is left out."""
        value = self._given(key, {})
        if not isinstance(value, dict):
            raise self.refusal(key, "an object is needed")
        return value

    def refusal(self, key: str, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {self.name(key)} is {shown(self.get(key))}: {wanted}")

    def _given(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.file}: {self.name(key)} is missing")
        return value


def shown(value: Any) -> str:
    """`value` in one short line."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def named(value: Any) -> str:
    """`value`, which should be a name."""
    return shown(value).strip('"')


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file. `Infinity` and `NaN` are numbers, as in Python's own JSON."""
    if not file.is_file():  # a pipe, say, would keep the reader waiting
        raise CheckpointError(f"{file}: no such file")
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: cannot be read (not an object)")
    return found


def _is_number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
