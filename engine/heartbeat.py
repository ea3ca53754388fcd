"""A page of shared memory in which a core tells that it lives and moves on; its parent reads it without asking it.

    word 0  beat    when the core's heartbeat thread last ran: every quarter of a second, however long a step takes
    word 1  began   when the turn of the core's loop that is under way began; 0 while the core waits for messages
    word 2  ended   when the latest turn ended
    word 3  turns   how many have ended

Times are nanoseconds of the monotonic clock, which all processes of a machine share. Each word has one writer and is
written by one store, so that nobody needs a lock. Imports no torch.
"""

import mmap
import os
import select
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

SOCKET, PAGE = "socket", "page"
"""Names in the folder that parent and core share while the core starts."""
_BEAT, _BEGAN, _ENDED, _TURNS = range(4)
_INTERVAL = 0.25
"""Seconds between beats."""
_LATE = 1_000_000_000
"""Nanoseconds without a beat after which the process's own time is asked for: a thread may be kept from running."""


class Heartbeat:
    """The core's end."""

    def __init__(self, path: str) -> None:
        self._words = _mapped(path)

    def start(self) -> None:
        """Beat from now on. The end of standard input, a pipe from the parent, ends the process wherever it is."""
        self._words[_BEAT] = time.monotonic_ns()
        threading.Thread(target=self._beat, name="octavo-heartbeat", daemon=True).start()

    def begin(self) -> None:
        """A turn of the loop begins."""
        self._words[_BEGAN] = time.monotonic_ns()

    def end(self) -> None:
        words = self._words
        words[_BEGAN] = 0
        words[_ENDED] = time.monotonic_ns()
        words[_TURNS] += 1

    def _beat(self) -> None:
        while not select.select([sys.stdin.fileno()], [], [], _INTERVAL)[0]:
            self._words[_BEAT] = time.monotonic_ns()
        os._exit(0)


class Pulse(NamedTuple):
    """What the page says at one moment."""

    beat_age: float
    """Seconds since the core showed that it runs, by a beat or by using processor time."""
    turn_age: float
    """Seconds that the turn under way has taken; 0 where none is."""
    num_turns: int


class Monitor:
    """The parent's end. `path` is created; the file can be removed once the core has it mapped."""

    def __init__(self, path: str) -> None:
        Path(path).write_bytes(bytes(mmap.PAGESIZE))
        self._words = _mapped(path)
        self._awake = time.monotonic_ns()
        self._ticks: int | None = None

    def look(self, pid: int) -> Pulse:
        """`pid` is the core's. Looks at least every second tell a core that cannot beat from one that is frozen: code
        that keeps the interpreter's lock for long uses processor time."""
        beat, began, _, num_turns = self._words[:4]
        now = time.monotonic_ns()
        if now - beat < _LATE:
            self._ticks = None
        else:
            ticks = _processor_ticks(pid)
            if self._ticks is not None and ticks > self._ticks:
                self._awake = now
            self._ticks = ticks
        age = now - max(beat, self._awake)
        return Pulse(age / 1e9, (now - began) / 1e9 if began else 0.0, num_turns)


def _mapped(path: str) -> memoryview:
    """Its words: signed, of 64 bits."""
    with open(path, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("q")


def _processor_ticks(pid: int) -> int:
    """That the process has used; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])
