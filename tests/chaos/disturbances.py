"""When the engine was kept from working, and by what: the only excuse that a failed request has."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Disturbance:
    """From the moment before the signal until the server has said that it is ready again."""

    begin: float
    end: float = math.inf
    kills: list[float] = field(default_factory=list)
    """When a core was killed."""
    is_stop: bool = False
    """A core was frozen."""


class Disturbances:
    def __init__(self) -> None:
        self.all: list[Disturbance] = []

    @contextmanager
    def one(self, *, is_stop: bool = False) -> Iterator[Disturbance]:
        disturbance = Disturbance(time.monotonic(), is_stop=is_stop)
        self.all.append(disturbance)
        yield disturbance
        disturbance.end = time.monotonic()

    @property
    def kills(self) -> list[float]:
        return [kill for disturbance in self.all for kill in disturbance.kills]

    def killed(self, begin: float, end: float) -> bool:
        """Whether there was a time without a core between `begin` and `end`."""
        return any(one.kills and one.kills[0] < end and one.end > begin for one in self.all)

    def stopped(self, begin: float, end: float) -> bool:
        return any(one.is_stop and one.begin < end and one.end > begin for one in self.all)

    def seconds_since_kill(self, moment: float) -> float:
        return min((moment - kill for kill in self.kills if kill < moment), default=math.inf)
