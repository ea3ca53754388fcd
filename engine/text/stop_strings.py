"""Stop strings in a growing text: nothing of a match leaves, and only text that may become one waits.

The stop strings of a request form an Aho-Corasick automaton (doi 10.1145/360825.360855). Its state after a
character is the longest end of the text that begins some stop string, so `depth` characters wait, and a match is
noticed at its last character, wherever the tokens' borders are. A character's cost stays flat as the text grows.
"""

from collections import deque
from functools import lru_cache


class _Automaton:
    """State 0 is the empty string. Lists are indexed by state."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match = [""]
        """The longest stop string that ends here; "" for none."""
        for stop in stops:
            self._insert(stop)
        self.fail = [0] * len(self.next)
        """The longest shorter end of the text that is a state too."""
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self.next[state]:
                self.next[state][character] = len(self.next)
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.match.append("")
            state = self.next[state][character]
        self.match[state] = stop

    def _link(self) -> None:
        """Breadth first, so that a state's failure is linked before the state."""
        todo = deque(self.next[0].values())
        while todo:
            state = todo.popleft()
            for character, child in self.next[state].items():
                self.fail[child] = self.step(self.fail[state], character)
                self.match[child] = self.match[child] or self.match[self.fail[child]]
                todo.append(child)

    def step(self, state: int, character: str) -> int:
        while state and character not in self.next[state]:
            state = self.fail[state]
        return self.next[state].get(character, 0)


_automaton = lru_cache(maxsize=16)(_Automaton)  # the choices of one request share theirs


class StopStringFilter:
    """Passes text on up to the first stop string: the one that is complete first, and the longest of those."""

    def __init__(self, stops: tuple[str, ...], *, include_in_output: bool = False) -> None:
        self._automaton = _automaton(stops)
        self._include_in_output = include_in_output
        self._state = 0
        self._waiting = ""

    def push(self, text: str, *, may_match: bool = True) -> tuple[str, str | None]:
        """Text that may leave, and the stop string that ends it.

        With `may_match` false, a stop string that ends inside `text` is text like any other.
        """
        automaton, state = self._automaton, self._state
        text, start = self._waiting + text, len(self._waiting)
        for position in range(start, len(text)):
            state = automaton.step(state, text[position])
            if may_match and automaton.match[state]:
                stop = automaton.match[state]
                self._waiting = ""
                end = position + 1
                return text[: end if self._include_in_output else end - len(stop)], stop
        while state and not automaton.next[state]:  # a whole stop string that was let through
            state = automaton.fail[state]
        self._state = state
        cut = len(text) - automaton.depth[state]
        self._waiting = text[cut:]
        return text[:cut], None

    def push_hidden(self, text: str) -> tuple[str, str | None]:
        """As `push` where a stop string ends with all of `text`; else nothing changes, as if it had not come."""
        before = self._state, self._waiting
        passed, _ = self.push(text[:-1], may_match=False)
        last, stop = self.push(text[-1:])
        if stop is not None and len(stop) >= len(text):
            return passed + last, stop
        self._state, self._waiting = before
        return "", None

    def finish(self) -> str:
        """What still waits, when no more text comes."""
        waiting, self._waiting, self._state = self._waiting, "", 0
        return waiting
