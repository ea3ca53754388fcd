"""What several routes share: request fields, usage, the list of models, the error object.

A request field of None was left out (or sent as null): its value comes from the checkpoint's generation config
or from OpenAI's default, see `server/convert/`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from configs.sampling import RepetitionDetection
from configs.settings import MAX_SECONDS

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
