"""Answers as they leave, where the routes put them together from parts: for the OpenAPI document."""

import msgspec
from msgspec import UNSET, UnsetType

from server.logprobs import TokenLogprob
from server.protocol import response_events
from server.protocol.ollama import OllamaMessage


class _OllamaAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whole, or a line of a stream; the counts come with the last one. Durations are nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChatAnswer(_OllamaAnswer, frozen=True, kw_only=True):
    message: OllamaMessage


class OllamaGenerateAnswer(_OllamaAnswer, frozen=True, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET
    """Token ids of prompt and answer, to be continued."""


RESPONSE_EVENTS = (
    response_events.ResponseEvent,
    response_events.ItemEvent,
    response_events.PartEvent,
    response_events.ReasoningDelta,
    response_events.ReasoningDone,
    response_events.TextDelta,
    response_events.TextDone,
    response_events.ArgumentsDelta,
    response_events.ArgumentsDone,
    response_events.ErrorEvent,
)
