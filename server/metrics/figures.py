"""What is counted, since the start of the server. `families.py` says what each figure is called outside."""

from collections import Counter

from engine.messages import CoreReady, StepStats
from server.metrics.histogram import (
    CHOICES_BUCKETS,
    FIRST_TOKEN_BUCKETS,
    LATENCY_BUCKETS,
    PREEMPTIONS_BUCKETS,
    STEP_BUCKETS,
    STEP_TOKENS_BUCKETS,
    TOKEN_LATENCY_BUCKETS,
    Histogram,
    token_buckets,
)
from server.metrics.records import FAILED, Choice, RequestRecord

_MEMORY = 0.98
"""Weight of the steps before against one more."""


class Figures:
    def __init__(self, info: CoreReady) -> None:
        tokens = token_buckets(info.max_model_len)
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.finished = Counter(dict.fromkeys(("stop", "length", "abort", "error", "repetition", "timeout"), 0))
        """Choices by finish reason."""
        self.http = Counter[tuple[str, str, str]]()
        """Answers by method, route and status."""
        self.refused = Counter({"queue_full": 0, "engine": 0, "shutting_down": 0})
        """Requests that did not begin, by reason."""
        self.first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self.inter_token = Histogram(TOKEN_LATENCY_BUCKETS)
        self.per_output_token = Histogram(TOKEN_LATENCY_BUCKETS)
        self.e2e, self.queue, self.inference, self.prefill, self.decode = (Histogram(LATENCY_BUCKETS) for _ in range(5))
        self.prompt_tokens, self.output_tokens, self.most_output_tokens, self.max_tokens, self.computed_tokens = (
            Histogram(tokens) for _ in range(5)
        )
        self.preemptions = Histogram(PREEMPTIONS_BUCKETS)
        self.choices = Histogram(CHOICES_BUCKETS)
        self.step_tokens = Histogram(STEP_TOKENS_BUCKETS)
        self.step_seconds = Histogram(STEP_BUCKETS)
        self.step_bytes = 0
        self._recent_bytes = self._recent_seconds = 0.0
        self._weight_bytes = info.weight_bytes
        self._block_bytes = info.kv_bytes_per_token * info.block_size

    @property
    def bytes_per_second(self) -> float:
        """Of the latest steps, the newest weighing most."""
        return self._recent_bytes / self._recent_seconds if self._recent_seconds else 0.0

    def note_step(self, stats: StepStats) -> None:
        self.step_seconds.observe(stats.step_seconds)
        self.step_tokens.observe(stats.step_tokens)
        step_bytes = self._weight_bytes + self._block_bytes * stats.num_used_blocks
        self.step_bytes += step_bytes
        self._recent_bytes = _MEMORY * self._recent_bytes + step_bytes
        self._recent_seconds = _MEMORY * self._recent_seconds + stats.step_seconds

    def note_first_token(self, choice: Choice, seconds: float) -> None:
        self.first_token.observe(seconds)
        self.num_prompt_tokens += choice.num_prompt_tokens

    def note_choice(self, choice: Choice, now: float) -> None:
        """One has ended, at `now`."""
        reason = choice.finish_reason or "error"
        self.finished[reason] += 1
        if choice.first_token is None and reason not in FAILED:
            self.num_prompt_tokens += choice.num_prompt_tokens  # of an embedding
        if choice.is_counted:
            self._note_sizes(choice)
        if reason not in FAILED:
            self._note_times(choice, now)

    def _note_times(self, choice: Choice, now: float) -> None:
        _, queue, prefill, decode = choice.phases(now)
        self.e2e.observe(now - choice.received)
        self.queue.observe(queue)
        self.prefill.observe(prefill)
        self.decode.observe(decode)
        self.inference.observe(prefill + decode)
        self.per_output_token.observe(choice.time_per_output_token)

    def _note_sizes(self, choice: Choice) -> None:
        """Their sums are what the counters of tokens count, once nothing runs."""
        self.prompt_tokens.observe(choice.num_prompt_tokens)
        self.computed_tokens.observe(choice.num_prompt_tokens - choice.num_cached_tokens)
        self.output_tokens.observe(choice.num_output_tokens)
        self.preemptions.observe(choice.timeline.num_preemptions if choice.timeline else 0)
        if choice.max_tokens:
            self.max_tokens.observe(choice.max_tokens)

    def note_request(self, record: RequestRecord) -> None:
        """All is over."""
        self.http[record.method, record.route, str(record.status)] += 1
        for start in range(0, len(record.choices), record.n):
            choices = record.choices[start : start + record.n]
            if any(choice.is_counted for choice in choices):
                self.choices.observe(record.n)
                self.most_output_tokens.observe(max(choice.num_output_tokens for choice in choices))
