"""`Bench`: what a section is given: its time, what was measured before, and where its findings go."""

import math
import time
from collections.abc import Callable
from typing import Any

from .plan import Plan

Event = dict[str, Any]


class Bench:
    """Findings are events, sent as they come: what a section found is not lost when it breaks."""

    def __init__(
        self,
        section: str,
        plan: Plan,
        seconds: float,
        emit: Callable[[Event], None],
        ceilings: dict[str, float] | None = None,
    ) -> None:
        self.section = section
        self.plan = plan
        self._end = time.monotonic() + seconds
        self._emit = emit
        self.ceilings = ceilings or {}
        """Bytes and operations per second, by `bandwidth` and `matrix_rate`; empty where they were not measured."""

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def has(self, seconds: float, what: str) -> bool:
        """Whether so much time is left; otherwise `what` is noted as skipped."""
        if self.left >= seconds:
            return True
        self.skip(what, "the section's time is used up")
        return False

    def check(self, what: str, error: float, limit: float, **facts: Any) -> None:
        """Passes when `error` is at most `limit`; NaN fails."""
        passed = error <= limit
        self._emit({"event": "check", "what": what, "error": error, "limit": limit, "passed": passed, **facts})
        self._say(f"{'ok  ' if passed else 'FAIL'} {what}: {error:.2g} of {limit:.2g}{_text(facts)}")

    def fail(self, what: str, error: Exception) -> None:
        """A check that could not be made to the end."""
        reason = f"{type(error).__name__}: {error}"[:400]
        self._emit({"event": "check", "what": what, "error": None, "limit": None, "passed": False, "reason": reason})
        self._say(f"FAIL {what}: {reason}")

    def measure(self, what: str, **figures: Any) -> None:
        self._emit({"event": "measurement", "what": what, **figures})
        self._say(f"{what}{_text(figures)}")

    def skip(self, what: str, reason: str) -> None:
        self._emit({"event": "skipped", "what": what, "reason": reason[:400]})
        self._say(f"skipped {what}: {reason[:160]}")

    def of_ceiling(self, name: str, rate: float) -> float | None:
        """Fraction of a ceiling, where that was measured."""
        return rate / self.ceilings[name] if self.ceilings.get(name) else None

    def _say(self, line: str) -> None:
        print(f"  {self.section:<16} {line}", flush=True)


def _text(figures: dict[str, Any]) -> str:
    return "".join(f"  {name} {_short(value)}" for name, value in figures.items() if value is not None)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)
