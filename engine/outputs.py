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
    """One choice: all that has come of it, which is all there will be once it has a finish reason."""

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

    def extend(self, new: RequestOutput) -> None:
        self.text += new.text
        self.delta = new.text
        self.token_ids += new.token_ids
        if new.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs += new.logprobs
        if new.prompt_logprobs is not None:
            self.prompt_logprobs = new.prompt_logprobs
        if new.embedding is not None:
            self.embedding = new.embedding
        self.finish_reason = new.finish_reason
        self.stop_reason = new.stop_reason


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
