"""The sections of the check, each in a process of its own.

What breaks one, an error of the device or a kernel that never ends, does not reach the others; its memory is free
when it is over, and a section that outstays its time is ended. The parent imports what they all need, so that a
section starts in no time, but it never touches the device: a process that did cannot be forked. Where something else
touches it, --start spawn helps, at some seconds more for each section.

Checks run side by side, for compiling is most of their time; what is timed runs alone.
"""

import itertools
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from engine.attention import BACKENDS

from . import (
    attention_checks,
    attention_speed,
    ceilings,
    engine_checks,
    model_checks,
    model_speed,
    peer,
    sampling_checks,
    tuning,
    workload,
)
from .bench import Bench, Event
from .document import environment
from .dry import stand_ins
from .plan import Plan
from .targets import compare

GRACE = 10.0
"""Seconds that a section may take beyond its time."""
DRY_BACKENDS = ("cpu", "triton", "torch_reference")
"""The others need a GPU for a part of their work, or take long to compile."""
DRY_PATIENCE = 3
"""A dry run has all the time that it needs on a busy machine."""
LEAST = 5.0
"""A section is not started with less."""


@dataclass(frozen=True)
class Section:
    name: str
    seconds: float
    """Most of the budget that it may take."""
    run: Callable[[Bench], None]
    is_timed: bool = False
    """Whether it has the machine for itself."""
    must_work: bool = True
    """Whether the check has failed when the section breaks."""


def all_sections(plan: Plan) -> list[Section]:
    backends = (
        [plan.backend] if plan.backend else [name for name in BACKENDS if not plan.is_dry or name in DRY_BACKENDS]
    )
    return [
        Section("ceilings", 15, ceilings.run, is_timed=True),
        *(Section(f"attention_{name}", 70, partial(attention_checks.run, name=name)) for name in backends),
        Section("sampling", 70, sampling_checks.run),
        Section("models", 70, model_checks.run),
        Section("engine", 70, engine_checks.run),
        Section("model_speed", 90, model_speed.run, is_timed=True),
        Section("workload", 55, workload.run, is_timed=True),
        Section("attention_speed", 50, attention_speed.run, is_timed=True),
        Section("peer", 45, peer.run, is_timed=True, must_work=False),
        Section("tuning", 60, tuning.run, is_timed=True, must_work=False),
    ]


def select(names: str, plan: Plan) -> list[Section]:
    """The sections of a list with commas, all for ""; the ceilings always. Ends the program for an unknown name."""
    wanted, sections = set(filter(None, names.split(","))), all_sections(plan)
    if unknown := wanted - {section.name for section in sections}:
        known = ", ".join(section.name for section in sections)
        sys.exit(f"--only {', '.join(sorted(unknown))}: unknown; there are {known}")
    return [section for section in sections if not wanted or section.name in wanted | {"ceilings"}]


@dataclass
class Running:
    """A section's process, and what came from it."""

    section: Section
    process: Any
    receiving: Connection
    end: float
    """By time.monotonic; when it is ended."""
    started: float
    events: list[Event] = field(default_factory=list)
    status: str = "broken"
    """done, failed, ended (it outstayed its time); broken until it has said that it is over."""
    reason: str = ""
    seconds: float = 0.0

    def take(self) -> bool:
        """One event; False when there are no more."""
        try:
            event = json.loads(self.receiving.recv_bytes())
        except EOFError:
            return False
        if event["event"] == "over":
            self.status, self.reason = event["status"], event["reason"]
        else:
            self.events.append(event)
        return True

    def close(self) -> None:
        if time.monotonic() >= self.end and self.status == "broken":
            self.status, self.reason = "ended", f"not over {GRACE:g} s after its time"
            self.process.kill()
        self.process.join()
        if self.status == "broken":
            self.status, self.reason = "failed", f"its process ended with status {self.process.exitcode}"
        self.seconds = time.monotonic() - self.started

    @property
    def findings(self) -> dict[str, Any]:
        return {"status": self.status, "reason": self.reason, "seconds": self.seconds, "events": self.events}


def run_all(sections: list[Section], plan: Plan, budget: float) -> dict[str, Any]:
    """The document: what was found, by section."""
    started = time.monotonic()
    found: dict[str, dict[str, Any]] = {}
    for is_timed, group in itertools.groupby(sections, key=lambda section: section.is_timed):
        for batch in [[one] for one in group] if is_timed else [list(group)]:
            left = budget - (time.monotonic() - started)
            names = ", ".join(section.name for section in batch)
            print(f"[{names}] {budget - left:.0f} s of {budget:g} s", flush=True)
            found |= _run(batch, plan, left, _rates(found)) if left >= LEAST else _skip(batch)
    return {
        "environment": environment(plan),
        "sections": found,
        "targets": compare(found),
        "failed": _failures(found, sections),
        "seconds": time.monotonic() - started,
    }


def _run(batch: list[Section], plan: Plan, left: float, rates: dict[str, float]) -> dict[str, dict[str, Any]]:
    patience = DRY_PATIENCE if plan.is_dry else 1
    running = [_start(section, plan, min(left, patience * section.seconds), rates) for section in batch]
    open_ones = {each.receiving: each for each in running}
    while open_ones:
        timeout = min(each.end for each in open_ones.values()) - time.monotonic()
        ready = [open_ones[connection] for connection in wait(list(open_ones), max(0.0, timeout))]
        late = [each for each in open_ones.values() if time.monotonic() >= each.end]
        for each in [one for one in ready if not one.take()] or (late if not ready else []):
            each.close()
            del open_ones[each.receiving]
            if each.status != "done":
                print(f"{each.section.name}: {each.status}: {each.reason}", flush=True)
    return {each.section.name: each.findings for each in running}


def _start(section: Section, plan: Plan, seconds: float, rates: dict[str, float]) -> Running:
    context = multiprocessing.get_context(plan.start)
    receiving, sending = context.Pipe(duplex=False)
    sys.stdout.flush()
    process = context.Process(target=_child, args=(section, plan, seconds, rates, sending))
    process.start()
    sending.close()
    now = time.monotonic()
    return Running(section, process, receiving, now + seconds + GRACE, now)


def _child(section: Section, plan: Plan, seconds: float, rates: dict[str, float], sending: Connection) -> None:
    def emit(event: Event) -> None:
        sending.send_bytes(json.dumps(event).encode())

    try:
        with stand_ins() if plan.is_dry else nullcontext():
            section.run(Bench(section.name, plan, seconds, emit, rates))
        emit({"event": "over", "status": "done", "reason": ""})
    except Exception as error:
        traceback.print_exc()
        emit({"event": "over", "status": "failed", "reason": f"{type(error).__name__}: {error}"[:800]})


def _skip(batch: list[Section]) -> dict[str, dict[str, Any]]:
    reason = "the budget is used up"
    print(f"  skipped: {reason}", flush=True)
    return {section.name: {"status": "skipped", "reason": reason, "seconds": 0.0, "events": []} for section in batch}


def _rates(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    return {event["what"]: event["rate"] for event in found.get("ceilings", {"events": []})["events"]}


def _failures(found: dict[str, dict[str, Any]], sections: list[Section]) -> list[str]:
    """Checks that did not pass, and sections that broke."""
    checks = [
        f"{name}: {event['what']}"
        for name, section in found.items()
        for event in section["events"]
        if not event.get("passed", True)
    ]
    broken = [each.name for each in sections if each.must_work and found[each.name]["status"] in ("failed", "ended")]
    return checks + broken
