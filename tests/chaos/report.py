"""What a run found: figures for people, violations for the exit code."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from .clients import Clients
from .litter import Litter
from .monkey import Monkey
from .spectator import Spectator
from .watch import MB, Sample, Watch, slope, total

SERVER_GROWTH = 1.0
"""MB per minute that the server's process may grow by, once it is warm."""
CORE_GROWTH = 1.0
WARM_UP = 0.4
"""Share of a process's life that is not measured."""
SERVER_SECONDS, CORE_SECONDS = 180.0, 45.0
"""Of measurement, below which a slope is noise: the server's tables fill up slowly."""
COUNTERS = ("vllm:num_preemptions_total", "octavo:recomputed_tokens_total", "vllm:generation_tokens_total")
EXPECTED = ("equal", "timeout", "left", "queue_full", "engine_dead", "engine_restarting", "vllm:num_preemptions_total")
ENOUGH_SECONDS = 120.0
"""For everything that is to be tested to happen."""
REQUEST_LINE = re.compile(r"octavo\.requests: .* request_id=(chaos-\S+)")


@dataclass
class Report:
    seed: int
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    num_kills: int = 0

    def note(self, text: str) -> None:
        self.notes.append(text)

    def gather(
        self, clients: Clients, monkey: Monkey, litterers: list[Litter], watch: Watch, spectator: Spectator
    ) -> None:
        """What they have noted."""
        self.violations += [*clients.violations, *monkey.violations, *watch.violations, *spectator.violations]
        self.outcomes, self.num_kills = clients.outcomes, len(monkey.disturbances.kills)
        self.note(f"{len(clients.sent)} requests: {_counts(clients.outcomes)}")
        self.note(f"deeds: {_counts(sum((one.deeds for one in litterers), monkey.deeds))}")
        self.note(f"{self.num_kills} kills, {total(watch.metrics, 'octavo:engine_restarts_total'):.0f} restarts")
        if times := sorted(monkey.recoveries):
            self.note(f"ready again after {times[len(times) // 2]:.1f} s (median), {times[-1]:.1f} s at most")
        self.note(
            f"knew of a kill after {clients.latest_ends['engine_dead']:.2f} s at most,"
            f" of a deadline {clients.latest_ends['timeout']:.2f} s late"
        )
        self.note(f"{spectator.num_frames} frames of the live view, {spectator.num_timelines} timelines")
        self.note("slowest " + ", ".join(f"{path} {seconds:.2f} s" for path, seconds in watch.slowest.items()))
        counts = {name: total(watch.metrics, name) for name in COUNTERS}
        self.note(", ".join(f"{name} {count:.0f}" for name, count in counts.items()))
        if self.seconds > ENOUGH_SECONDS:
            happened = {**self.outcomes, **counts}
            self.violations += [f"{name} 0: that was not tested" for name in EXPECTED if not happened.get(name)]

    def __str__(self) -> str:
        lines = [f"chaos: seed {self.seed}, {self.seconds:.0f} s", *self.notes]
        lines += [f"VIOLATION {text}" for text in self.violations] or ["no violation"]
        return "\n  ".join(lines)


def judge_memory(report: Report, watch: Watch) -> None:
    """Flat: the slope of the resident memory, of the server and of each core that lived for long."""
    _judge(report, "the server", watch.server_memory, SERVER_GROWTH, SERVER_SECONDS)
    for pid, samples in watch.core_memory.items():
        if (samples[-1][0] - samples[0][0]) * (1 - WARM_UP) > CORE_SECONDS:
            _judge(report, f"core {pid}", samples, CORE_GROWTH, CORE_SECONDS)


def _judge(report: Report, name: str, samples: list[Sample], limit: float, seconds: float) -> None:
    begin, end = samples[0][0], samples[-1][0]
    warm = [(at, value) for at, value in samples if at >= begin + WARM_UP * (end - begin)]
    growth = slope(warm) * 60 / MB
    first, last = samples[0][1] / MB, samples[-1][1] / MB
    report.note(
        f"memory of {name}: {first:.1f} to {last:.1f} MB, {growth:+.2f} MB/min in the last {end - warm[0][0]:.0f} s"
    )
    if end - warm[0][0] >= seconds and growth > limit:
        report.violations.append(f"memory of {name} grows by {growth:.2f} MB/min")


def judge_log(report: Report, log: Path, clients: Clients) -> None:
    """Every request has one line there, at its end; there is no traceback."""
    text = log.read_text(errors="replace")
    ends = Counter(REQUEST_LINE.findall(text))
    report.violations += [f"{name} ended {count} times" for name, count in ends.items() if count > 1]
    report.violations += [f"{name} never ended" for name in sorted(clients.answered - ends.keys())]
    report.violations += [f"{name} was never sent" for name in sorted(ends.keys() - clients.sent.keys())]
    if (place := text.find("Traceback")) >= 0:
        report.violations.append(f"{text.count('Traceback')} tracebacks: {text[max(0, place - 500) : place + 2000]}")


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name.strip('_')}" for name, count in counter.most_common())
