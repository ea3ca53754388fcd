"""`Watcher`: follows the choices of all requests through the engine, message by message."""

import time
from collections import Counter, deque

from engine.messages import AddRequest, StepStats, TokenOutput
from engine.observer import Observer
from scheduler.timeline import Timeline
from server.metrics.figures import Figures
from server.metrics.records import CURRENT, Choice

_NO_TOKEN = 0.0
_KEPT_CAUSES = 1000

Cause = tuple[float, str | None]
"""Since when requests wait for what; None: nobody waits."""


class Watcher(Observer):
    def __init__(self, figures: Figures) -> None:
        self.figures = figures
        self.causes: deque[Cause] = deque([(0.0, None)], maxlen=_KEPT_CAUSES)
        """The newest last."""
        self._choices: dict[str, Choice] = {}
        self._last_token: dict[str, float] = {}  # when each of them got its latest one; but of these, it is `_time`:
        self._newest: list[str] = []
        self._time = 0.0
        self._stats: StepStats | None = None

    def began(self, request: AddRequest) -> Choice:
        self._settle()
        record = CURRENT.get()
        choice = Choice.of(request, record, time.monotonic())
        if record is not None:
            record.add(choice)
        self._choices[choice.request_id] = choice
        self._last_token[choice.request_id] = _NO_TOKEN
        return choice

    def owner_of(self, request_id: str) -> str | None:
        """The owner of a choice that runs; None for any other id."""
        choice = self._choices.get(request_id)
        return choice.owner if choice else None

    def stepped(self, outputs: list[TokenOutput], stats: StepStats | None) -> None:
        """Costs little per token where a step gives one to the same choices as the step before."""
        if stats is not None:
            self._note_stats(stats)
        names = [output.request_id for output in outputs if output.new_token_ids]
        now = time.monotonic() if stats is None else stats.time
        if names and names == self._newest:
            self.figures.inter_token.observe(now - self._time, len(names))
            self.figures.num_output_tokens += sum([len(output.new_token_ids) for output in outputs])
            self._time = now
        elif outputs:
            self._note_others(outputs, now)

    def ended(self, choice: Choice, reason: str, num_output_tokens: int, timeline: Timeline | None) -> None:
        now = time.monotonic()
        self._settle()
        if self._choices.get(choice.request_id) is choice:
            del self._choices[choice.request_id]
            choice.last_token = self._last_token.pop(choice.request_id) or None
        choice.ended, choice.finish_reason, choice.num_output_tokens = now, reason, num_output_tokens
        choice.timeline = timeline or choice.timeline
        timeline = choice.timeline
        if timeline is not None and timeline.ended is None and self._stats is not None:  # the core was not asked
            timeline.note_end(now, self._stats.counters)
        self.figures.note_choice(choice, now)

    def _note_others(self, outputs: list[TokenOutput], now: float) -> None:
        """Those that got tokens had their latest ones at different times, or have none yet, or have ended here."""
        self._settle()
        last_token = self._last_token
        known = [output for output in outputs if output.request_id in last_token]
        for output in known:
            if output.timeline is not None:
                choice = self._choices[output.request_id]
                choice.timeline, choice.num_cached_tokens = output.timeline, output.num_cached_tokens
        known = [output for output in known if output.new_token_ids]
        names = [output.request_id for output in known]
        since = Counter(map(last_token.__getitem__, names))
        if since.pop(_NO_TOKEN, 0):
            self._note_first_tokens([name for name in names if last_token[name] == _NO_TOKEN], now)
        for before, times in since.items():
            self.figures.inter_token.observe(now - before, times)
        self.figures.num_output_tokens += sum([len(output.new_token_ids) for output in known])
        self._newest, self._time = names, now

    def _settle(self) -> None:
        self._last_token.update(dict.fromkeys(self._newest, self._time))
        self._newest = []

    def _note_stats(self, stats: StepStats) -> None:
        if stats.step_tokens and (self._stats is None or stats.time != self._stats.time):
            self.figures.note_step(stats)
        if stats.wait_cause != self.causes[-1][1]:
            self.causes.append((time.monotonic(), stats.wait_cause))
        self._stats = stats

    def _note_first_tokens(self, request_ids: list[str], step_ended: float) -> None:
        now = time.monotonic()
        for request_id in request_ids:
            choice = self._choices[request_id]
            choice.first_token = step_ended
            self.figures.note_first_token(choice, now - choice.received)
