"""`Timeline`: what happened to one request; `Counters`: to all of them. Times are the caller's seconds."""

import msgspec

MAX_CHUNKS = 64
"""That a timeline keeps; of more there is only the number."""


class Counters(msgspec.Struct, kw_only=True):
    """Since the start; they never fall. Sums over steps count each step's own value."""

    num_steps: int = 0
    num_step_requests: int = 0
    num_step_tokens: int = 0
    num_recomputed_tokens: int = 0
    """Of requests that had computed them before they were preempted."""
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    """Tokens of admitted requests that were looked for in the prefix cache, and of them"""
    num_prefix_hits: int = 0
    """those that were found."""

    def __add__(self, other: "Counters") -> "Counters":
        fields = self.__struct_fields__
        return Counters(**{field: getattr(self, field) + getattr(other, field) for field in fields})


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A step that computed several tokens of the request."""

    time: float
    num_tokens: int
    num_step_tokens: int
    num_step_requests: int


class Timeline(msgspec.Struct, kw_only=True):
    """None for what has not happened."""

    queued: float
    admitted: float | None = None
    first_token: float | None = None
    ended: float | None = None
    chunks: list[Chunk] = []
    num_chunks: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    steps_at_first_token: int = 0
    """`Counters.num_steps` then; likewise:"""
    step_requests_at_first_token: int = 0
    num_decode_steps: int = 0
    """Steps of the engine between the first token and the end, and"""
    mean_step_requests: float = 0.0
    """requests in each of them on average."""
    is_told: bool = False
    """Whether the other process has it as it was at the first token, or at the first one behind a preemption."""

    def add_chunk(self, chunk: Chunk) -> None:
        self.num_chunks += 1
        if self.num_chunks <= MAX_CHUNKS:
            self.chunks.append(chunk)

    def note_first_token(self, now: float, counters: Counters) -> None:
        self.first_token = now
        self.steps_at_first_token = counters.num_steps
        self.step_requests_at_first_token = counters.num_step_requests

    def note_end(self, now: float, counters: Counters) -> None:
        self.ended = now
        if self.first_token is not None:
            self.num_decode_steps = counters.num_steps - self.steps_at_first_token
            requests = counters.num_step_requests - self.step_requests_at_first_token
            self.mean_step_requests = requests / max(1, self.num_decode_steps)
