"""One request's tokens to text deltas, up to a stop string."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec

from configs.sampling import SamplingParams
from engine.thinking import ReasoningPart

from .stop_strings import StopStringFilter
from .tokenizer import TextStream, Tokenizer


class TextDelta(msgspec.Struct, frozen=True):
    """What some new tokens add."""

    text: str
    num_tokens: int
    """How many of the tokens count: those after the one that completed a stop string do not."""
    stop_string: str | None = None
    """The stop string that ended the text. The core has not noticed: abort the request."""


class Detokenizer:
    """Joined deltas are the text of prompt and output together, less the prompt's.

    Text waits only inside a character and where it may become a stop string. A stop string counts when its last
    character belongs to output token `min_tokens` or a later one; one that is complete before stays in the text, and so
    does one in the reasoning part. One that ends with a special token counts at that token, though texts leave it out,
    and alone it does so anywhere. Cost per token does not depend on how many there were.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._stream = TextStream(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            shown_token_ids=params.shown_token_ids,
            prompt_token_ids=prompt_token_ids,
        )
        self._stops = StopStringFilter(params.stop, include_in_output=params.include_stop_str_in_output)
        self._has_stops = bool(params.stop)
        self._hidden: Mapping[int, str] = {}
        if params.stop and params.skip_special_tokens:
            self._hidden = _hidden_ends(tokenizer, params.stop, params.shown_token_ids)
        reasoning = params.reasoning
        self._reasoning = None if reasoning is None else ReasoningPart(reasoning.opening, reasoning.closing)
        self._undecided = ""  # may begin a reasoning part
        self._keep_stop_token = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._ended = False

    def push(self, token_ids: Sequence[int], finish_reason: str | None = None) -> TextDelta:
        """Text of the next output tokens; with a `finish_reason` they are the last, and what waits leaves.

        When the reason is `stop`, the last id is the one that ended the request, and its text is left out unless
        `include_stop_str_in_output` is set. Tokens after the end, from a core that is a step ahead, count for
        nothing.
        """
        if self._ended:
            return TextDelta("", 0)
        shown = token_ids[: len(token_ids) - (finish_reason == "stop" and not self._keep_stop_token)]
        texts: list[str] = []
        if self._has_stops:
            for count, token_id in enumerate(token_ids, start=1):
                self._num_tokens += 1
                stop = None
                if token_id in self._hidden:
                    stop = self._add_hidden(self._hidden[token_id], texts)
                elif count <= len(shown):
                    stop = self._add(self._stream.push(token_id), texts)
                if stop is not None:
                    return self._end(texts, count, stop)
        else:
            texts += map(self._stream.push, shown)
        if finish_reason is None:
            return TextDelta("".join(texts), len(token_ids))
        rest, self._reasoning = self._undecided + self._stream.finish(), None
        stop = self._add(rest, texts)
        if stop is None:
            texts.append(self._stops.finish())
        return self._end(texts, len(token_ids), stop)

    def _add(self, text: str, texts: list[str]) -> str | None:
        if self._has_stops and (part := self._reasoning) is not None:
            self._undecided += text
            content = part.read(text)
            if not part.is_inside and not part.is_over:
                return None
            texts.append(self._undecided[: len(self._undecided) - len(content)])
            text, self._undecided = content, ""
        text, stop = self._stops.push(text, may_match=self._num_tokens >= self._min_tokens)
        texts.append(text)
        return stop

    def _add_hidden(self, text: str, texts: list[str]) -> str | None:
        if self._num_tokens < self._min_tokens:
            return None
        before, stop = self._stops.push_hidden(text)
        texts += [self._undecided, before] if stop is not None else []
        return stop

    def _end(self, texts: list[str], num_tokens: int, stop_string: str | None) -> TextDelta:
        self._ended = True
        return TextDelta("".join(texts), num_tokens, stop_string)


@lru_cache(maxsize=16)  # the choices of one request share theirs
def _hidden_ends(tokenizer: Tokenizer, stops: tuple[str, ...], shown_token_ids: tuple[int, ...]) -> dict[int, str]:
    """The special tokens that the text leaves out and a stop string ends with, by their ids."""
    texts = {token_id: tokenizer.token(token_id) for token_id in tokenizer.special_ids - {*shown_token_ids}}
    ends = {stop[-size:] for size in set(map(len, texts.values())) for stop in stops}
    return {token_id: text for token_id, text in texts.items() if text and text in ends}
