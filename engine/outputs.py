"""What callers of `AsyncEngine` and `LLM` get. Imports no torch."""

from dataclasses import dataclass, field

import msgspec

from configs.errors import RequestError

from .messages import TokenLogprobs


class RequestOutput(msgspec.Struct, frozen=True):
    """What is new since the last one. `text`, `token_ids` and `logprobs` are differences, counts are totals."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    """One entry per token id; None when none were asked for."""
    finish_reason: str | None
    """stop, length, repetition or timeout; None while the request runs. Failures are raised."""
    stop_reason: int | str | None
    """The stop id or stop string that matched; None for end-of-sequence and other reasons."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of all tokens of the prompt but the first; whole, in the request's first output."""
    embedding: list[float] | None = None
    """Pooled final hidden states of the prompt, not scaled to length 1; whole, in the only output."""


OutputBatch = list[tuple[int, RequestOutput]]
"""What came at once, at most one output per choice, each with the index of its choice."""


@dataclass
class CompletionOutput:
    """One finished choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    """stop, length, repetition, timeout or error."""
    stop_reason: int | str | None = None
    error: str | None = None
    """Why, when `finish_reason` is error."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: list[float] | None = None
    cumulative_logprob: float | None = None
    """Of all tokens together; of beams only."""
    delta: str = field(default="", compare=False)
    """Text that is new since `LLM.stream` gave the request last."""

    def extend(self, delta: RequestOutput) -> None:
        self.text += delta.text
        self.delta = delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.embedding is not None:
            self.embedding = delta.embedding
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


@dataclass
class CompletedRequest:
    """A prompt with its `n` choices."""

    prompt: str | None
    """None when token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    def extend(self, batch: OutputBatch | RequestError) -> None:
        """An error ends the choices that still run."""
        for output in self.outputs:
            output.delta = ""
            if isinstance(batch, RequestError) and output.finish_reason is None:
                output.finish_reason, output.error = "error", batch.message
        if not isinstance(batch, RequestError):
            for index, new in batch:
                self.outputs[index].extend(new)
                self.num_cached_tokens = new.num_cached_tokens
