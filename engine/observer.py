"""What is told of requests while they run, to whoever measures the engine. Imports no torch."""

from typing import Any

from scheduler.timeline import Timeline

from .messages import AddRequest, StepStats, TokenOutput


class Observer:
    """Hears of everything, on the event loop, and so must not take long. This one makes nothing of it."""

    def began(self, request: AddRequest) -> Any:
        """`request` goes to the core. Returns what `ended` is to name it by: its id may be another's by then."""

    def stepped(self, outputs: list[TokenOutput], stats: StepStats | None) -> None:
        """A message of the core's, also of requests that have ended here meanwhile. `stats`: its own, not summed."""

    def ended(self, begun: Any, reason: str, num_output_tokens: int, timeline: Timeline | None) -> None:
        """Once for each that began. `reason` is that of its last output, or `abort`, or `error`; the timeline is there
        if the core has ended it."""
