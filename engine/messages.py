"""Messages between the API side and the core: plain frozen structs, msgpack on the wire.

API side -> core:   AddRequest, AbortRequests, GetSnapshot
core -> API side:   CoreReady once (or CoreFailed), then StepOutputs, and a Snapshot for each time it was asked for
"""

import msgspec

from configs.sampling import SamplingParams
from scheduler.timeline import Counters, Timeline


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One prompt, one choice."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    """End-of-sequence ids of the checkpoint (generation config and tokenizer together)."""
    priority: int = 0
    """Lower runs first under the `priority` policy."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with equal salts."""
    deadline: float | None = None
    """Seconds of the monotonic clock, which all processes share."""


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """Forget these requests; unknown ids are ignored. An output with finish reason `abort` for each tells that nothing
    more will come of it."""

    request_ids: list[str]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of the raw model distribution at one position."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    """The likeliest ids with their logprobs, best first; as many as were asked for."""
    rank: int | None = None
    """Of `token_id`: 1 for the likeliest."""


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one request. Exactly one output per request carries a `finish_reason`."""

    request_id: str
    new_token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of all tokens of the prompt but the first: with the request's first output, if they were asked for."""
    embedding: list[float] | None = None
    """The pooled final hidden states of the prompt, not scaled to length 1; comes as `prompt_logprobs` do."""
    finish_reason: str | None = None
    """stop, complete (the output's language ends with its last token), length, repetition, timeout, abort or error."""
    stop_reason: int | None = None
    """The stop id of the request that matched; None for end-of-sequence."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    timeline: Timeline | None = None
    """With the finish reason, with the first token, and with the first one behind a preemption."""
    error: str | None = None
    """Why, when `finish_reason` is error."""
    error_type: str = "RequestFailed"
    """The class in configs/errors.py that the caller gets with `error`."""
    error_param: str | None = None
    """The field of the request that is to blame for `error`."""


class StepStats(msgspec.Struct, frozen=True, array_like=True):
    """How the core is since its newest step."""

    time: float
    """Seconds of the monotonic clock, which all processes share."""
    num_running: int
    num_waiting: int
    """Those whose language is still compiled included."""
    num_used_blocks: int
    step_seconds: float
    """From the start of the step to its tokens; 0 where no step was made."""
    step_tokens: int
    wait_cause: str | None
    """See `Scheduler.wait_cause`."""
    counters: Counters

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """What others have to hear of when it changes."""
        return self.num_running, self.num_waiting, self.num_used_blocks, self.counters.num_steps


NO_STATS = StepStats(0.0, 0, 0, 0, 0.0, 0, None, Counters())


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """Outputs of one step, in the order of the batch."""

    outputs: list[TokenOutput]
    stats: StepStats | None = None


class GetSnapshot(msgspec.Struct, frozen=True, tag=True):
    """Answered by a Snapshot, in order."""


class RequestSnapshot(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    is_running: bool
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    """In order of position; 0 where the sliding window has moved on."""
    timeline: Timeline


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """Everything that can be seen at one moment."""

    stats: StepStats
    requests: list[RequestSnapshot]
    """Running ones first, best first; then waiting ones."""
    blocks: bytes
    """Of each block of the KV cache, the reserved block 0 included: how many requests hold it, 254 at most; a free
    block is 0, or 255 where its content can still be found."""


class CoreReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What was loaded; sent once, when a request would be answered."""

    architecture: str
    num_parameters: int
    weight_bytes: int = 0
    """Of the weights that every step reads: all but an embedding that is not the head too."""
    kv_bytes_per_token: int = 0
    dtype: str
    kv_cache_dtype: str
    quantization: str
    """How the linear layers' weights are kept: none, int8, int4 or GGUF types."""
    device: str
    attention_backend: str
    notes: list[str]
    """Lines for the start-up message: backends not taken and why, what is lost without a compiler, …"""
    vocab_size: int
    max_model_len: int
    kv_cache_tokens: int
    block_size: int
    num_threads: int
    timings: dict[str, float]
    """Seconds per phase of the start-up, in order."""


class CoreFailed(msgspec.Struct, frozen=True, tag=True):
    """Start-up ended; `message` is one line for the person who started it."""

    message: str


ToCore = AddRequest | AbortRequests | GetSnapshot
FromCore = StepOutputs | CoreReady | CoreFailed | Snapshot
