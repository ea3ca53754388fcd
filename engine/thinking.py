"""A bound of the reasoning part: once its tokens are spent, the marker that ends it is forced."""

from collections import deque

from configs.sampling import ThinkingBudget


class Thinking:
    """The reasoning part of one output, as it grows."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._inside = not budget.begin
        self._over = False
        self._num_tokens = 0
        self._newest: deque[int] = deque(maxlen=max(len(budget.begin), len(budget.end)))

    def append(self, token_id: int) -> None:
        """The output grew by one token."""
        if self._over:
            return
        self._newest.append(token_id)
        newest, budget = tuple(self._newest), self._budget
        if self._inside:
            self._num_tokens += 1
            self._over = newest[-len(budget.end) :] == budget.end
        else:
            self._inside = newest[-len(budget.begin) :] == budget.begin

    @property
    def forced_id(self) -> int | None:
        """The only id that may come next: the next one of the closing marker."""
        if self._over or not self._inside or self._num_tokens < self._budget.max_tokens:
            return None
        newest, end = tuple(self._newest), self._budget.end
        written = next(count for count in range(len(end) - 1, -1, -1) if newest[len(newest) - count :] == end[:count])
        return end[written]
