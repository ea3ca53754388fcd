"""What a run is to be like."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    seconds: float
    seed: int
    num_clients: int = 16
    num_jobs: int = 120
    model: str | None = None
    """Default: a tiny one with random weights."""
    flags: tuple[str, ...] = ()
    """More of the server's."""
    is_short: bool = False
    """Without deeds that take long."""

    def rng(self, name: str) -> random.Random:
        """One for each who draws, so that nobody's draws depend on others' timing."""
        return random.Random(f"{self.seed} {name}")
