"""What several routes share: request fields, usage, the list of models, the error object.

A request field of None was left out (or sent as null): its value comes from the checkpoint's generation config
or from OpenAI's default, see `server/convert/`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from configs.sampling import RepetitionDetection
from configs.settings import MAX_SECONDS
from server.protocol.unsupported import HINTS, UNSUPPORTED, WITHOUT_EFFECT

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}(?!\n)$")]
"""As the header X-Request-Id: what could do harm nowhere that an id is printed."""
Timeout = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
"""Seconds of a request, after which it ends with what it has and finish reason `timeout`."""


class RequestBody(msgspec.Struct, kw_only=True):
    """What every route's body is. Fields that it does not declare are ignored and reported, but for these sets."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that are refused, with the values that ask for nothing and pass; see `protocol/unsupported.py`."""
    hints: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """As `unsupported`, but other values are ignored and reported: they change no answer."""
    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Known fields that cannot change an answer here: labels and hints."""
    one_of: ClassVar[tuple[str, ...]] = ()
    """Of these fields, exactly one is given."""
    any_content_type: ClassVar[bool] = False
    """Whatever it is called, the body is JSON. Elsewhere it is called so, or not called anything."""


class ModelRequest(RequestBody, kw_only=True):
    model: str | None = None
    """The served name; left out, the served model answers."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    """Send one more chunk with the usage and no choices before `[DONE]`."""
    continuous_usage_stats: bool | None = None
    """Every chunk carries the usage so far."""
    include_obfuscation: bool | None = None
    """Only false is honoured: chunks are not padded."""


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's way to say which language the answer belongs to: one of these."""

    json: str | bool | dict[str, Any] | None = None
    """A JSON schema, or its text."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """EBNF with a rule `root`."""
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    """xgrammar's: parts of the text begin with a trigger and belong to a language of their own."""


class SamplingFields(RequestBody, kw_only=True):
    """How one answer is decoded: the fields of `SamplingParams`, which are described there."""

    n: Int64 | None = None
    max_tokens: int | None = None
    min_tokens: Int64 | None = None
    temperature: float | None = None
    top_k: Int64 | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[Int64, float] | None = None
    bad_token_ids: tuple[Int64, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    allowed_token_ids: tuple[Int64, ...] | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[Int64, ...] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    """Answer with the `n` likeliest sequences instead of drawn ones; cannot be streamed."""
    length_penalty: float | None = None
    """Of beam search: sums of log-probabilities are divided by length to this power (default 1)."""
    prompt_logprobs: Int64 | None = None
    logprob_token_ids: tuple[Int64, ...] | None = None
    repetition_detection: RepetitionDetection | None = None
    structured_outputs: StructuredOutputs | None = None


class GenerationRequest(SamplingFields, kw_only=True):
    """Fields of /v1/completions and /v1/chat/completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED
    hints: ClassVar[Mapping[str, tuple[Any, ...]]] = HINTS | {"store": (False,)}
    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT

    model: str | None = None
    """The served name; left out, the served model answers."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    """Send a choice's text every so many tokens; the first comes at once."""
    max_completion_tokens: int | None = None
    """The newer name of max_tokens; wins when both are given."""
    echo: bool | None = None
    """Begin the answer with the prompt; of a chat, with the message that it continues."""
    response_format: dict[str, Any] | None = None
    """OpenAI's {"type": "text" | "json_object" | "json_schema", …}."""
    guided_json: str | bool | dict[str, Any] | None = None
    """This and the three below: the older names of what `structured_outputs` holds."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None
    """Add the ids of prompt and output to the answer."""
    return_tokens_as_token_ids: bool | None = None
    """Write the tokens of logprobs as `token_id:7`, which tells tokens of equal text apart."""
    truncate_prompt_tokens: Int64 | None = None
    """Keep only this many of the prompt's tokens; -1: as many as the context holds."""
    truncation_side: Literal["left", "right"] | None = None
    """Where tokens are left out (default left)."""
    request_id: RequestId | None = None
    """The answer's id ends with it; no two running requests of one key may have the same."""
    priority: Int64 | None = None
    """Lower runs first under the `priority` policy."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with equal salts."""
    timeout_s: Timeout | None = None
    """Seconds until the answer ends as it is, with finish_reason `timeout`; the server may have a bound of its own."""

    @property
    def answers_with_prompt(self) -> bool:
        """Whether an answer without a single generated token says something."""
        return bool(self.echo) or self.prompt_logprobs is not None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Each prompt counts once, whatever `n` is; completion tokens sum over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


UsageField = Usage | None | UnsetType
"""Of a chunk: absent unless asked for, then null in every chunk but the last."""

StopReason = int | str | UnsetType
"""The stop id or stop string that ended the choice; absent otherwise."""


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int | None
    """1 for the likeliest."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt: the token itself and the likeliest ones by id; null for the first."""


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer or one chunk of it: what all four kinds begin with."""

    id: str
    object: str
    created: int
    """Unix seconds."""
    model: str
    system_fingerprint: str
    choices: list[Any] = []
    usage: UsageField = UNSET
