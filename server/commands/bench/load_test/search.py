"""The highest rate that holds: doubling until one does not, then halving the gap, on a logarithmic scale."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

Holds = Callable[[float], Awaitable[bool | None]]
"""None ends the search."""
MAX_HALVINGS = 6


class Bracket(NamedTuple):
    """The highest rate that held, and the lowest that did not. None where there was none."""

    holds: float | None
    fails: float | None


async def highest(holds: Holds, start: float, limit: float, precision: float) -> Bracket:
    """Ends when the rates are within `precision` of each other, at `limit`, or when even start / 64 fails."""
    found = Bracket(None, None)
    rate = min(start, limit)
    while True:
        answer = await holds(rate)
        if answer is None:
            return found
        found = found._replace(**{"holds" if answer else "fails": rate})
        following = _next(found, start, limit, precision)
        if following is None:
            return found
        rate = following


def _next(found: Bracket, start: float, limit: float, precision: float) -> float | None:
    low, high = found
    if low is None:
        assert high is not None
        return high / 2 if high > start / 2**MAX_HALVINGS else None
    if high is None:
        return min(2 * low, limit) if low < limit else None
    return float((low * high) ** 0.5) if high / low > 1 + precision else None
