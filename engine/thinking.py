"""The reasoning part of an output, found by its text as the answer's parser finds it, and the bound of its tokens."""

from collections import deque

from configs.sampling import ThinkingBudget

_OTHER = "\ufffd"
"""Stands for tokens that no marker can be made of."""


class ReasoningPart:
    """The part of a growing text between two markers: at its beginning, behind white space at most, or nowhere."""

    def __init__(self, opening: str, closing: str) -> None:
        """Without an opening marker the text begins inside; without a closing one it stays there."""
        self.is_inside = not opening
        self.is_over = False
        """No such part begins any more."""
        self._opening, self._closing = opening, closing
        self._text = ""  # what may become a marker
        self._is_before_content = False

    def read(self, text: str) -> str:
        """The text goes on; returns what lies behind the part, or all of it once it is clear that there is none.

        Line breaks behind the closing marker belong to it.
        """
        if not self.is_over:
            text = self._find(self._text + text)
        if self._is_before_content:
            text = text.lstrip("\n")
            self._is_before_content = not text
        return text

    def _find(self, text: str) -> str:
        if not self.is_inside:
            start = text.lstrip()
            if self._opening.startswith(start) and start != self._opening:
                self._text = text
                return ""
            self.is_inside = start.startswith(self._opening)
            self.is_over = not self.is_inside
            if self.is_over:
                return text
            text = start.removeprefix(self._opening)
        before, closing, rest = text.partition(self._closing) if self._closing else (text, "", "")
        self._text = before[max(0, len(before) - len(self._closing) + 1) :]
        self.is_over = self._is_before_content = bool(closing)
        self.is_inside = not self.is_over
        return rest


class Thinking:
    """The budget of one output, as it grows: once it is spent, the tokens that end the part are forced."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._part = ReasoningPart(budget.opening, budget.closing)
        self._is_over = False
        self._num_tokens = 0
        self._newest: deque[int] = deque(maxlen=len(budget.end))

    def append(self, token_id: int) -> None:
        """The output grew by one token."""
        if self._is_over:
            return
        self._newest.append(token_id)
        self._num_tokens += self._part.is_inside
        self._part.read(self._budget.spellings.get(token_id, _OTHER))
        self._is_over = self._part.is_over or tuple(self._newest) == self._budget.end

    @property
    def forced_id(self) -> int | None:
        """The only id that may come next: the next one of the end."""
        if self._is_over or not self._part.is_inside or self._num_tokens < self._budget.max_tokens:
            return None
        newest, end = tuple(self._newest), self._budget.end
        written = next(count for count in range(len(end) - 1, -1, -1) if newest[len(newest) - count :] == end[:count])
        return end[written]
