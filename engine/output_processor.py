"""`OutputProcessor`: one request's tokens to text, stop strings and counts. Imports no torch."""

from collections.abc import Sequence
from functools import lru_cache

import configs.errors
from configs.sampling import SamplingParams

from .messages import TokenOutput
from .outputs import RequestOutput
from .text.stop_strings import StopStringFilter
from .text.tokenizer import TextStream, Tokenizer
from .thinking import ReasoningPart


class OutputProcessor:
    """Joined texts are those of prompt and output together, less the prompt's.

    Text waits only inside a character and where it may become a stop string. A stop string counts when its last
    character belongs to output token `min_tokens` or a later one; one that is complete before stays in the text, and so
    does one in the reasoning part. One that ends with a special token counts at that token, though texts leave it out,
    and alone it does so anywhere. Cost per token does not depend on how many there were.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self.num_output_tokens = 0
        """Those after a stop string do not count."""
        self._num_prompt_tokens = len(prompt_token_ids)
        self._keep_stop_token = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._stream = TextStream(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            shown_token_ids=params.shown_token_ids,
            prompt_token_ids=prompt_token_ids,
        )
        self._has_stops = bool(params.stop)
        if self._has_stops:
            self._stops = StopStringFilter(params.stop, include_in_output=params.include_stop_str_in_output)
            self._hidden = _hidden_ends(tokenizer, params.stop, self._stream.hidden_ids)
            reasoning = params.reasoning
            self._reasoning = None if reasoning is None else ReasoningPart(reasoning.opening, reasoning.closing)
            self._undecided = ""  # may begin a reasoning part

    def process(self, output: TokenOutput) -> RequestOutput:
        """What the caller sees of `output`: with a finish reason it is the last one, and what waits leaves.

        Its own `finish_reason` is `stop` when a stop string has matched; the core does not know of that and has to be
        told. Where the core says `stop`, the last id is the one that ended the request, and its text is left out
        unless `include_stop_str_in_output` is set. Raises the `RequestError` that the core has named.
        """
        token_ids, logprobs, reason = output.new_token_ids, output.logprobs, output.finish_reason
        if reason == "error":
            raise getattr(configs.errors, output.error_type)(output.error, param=output.error_param)
        shown = token_ids[:-1] if reason == "stop" and not self._keep_stop_token else token_ids
        stop_string = None
        if self._has_stops:
            text, num_tokens, stop_string = self._up_to_stop(token_ids, len(shown), is_last=reason is not None)
            token_ids, logprobs = token_ids[:num_tokens], logprobs and logprobs[:num_tokens]
        else:
            text = "".join(map(self._stream.push, shown))
            text += self._stream.finish() if reason is not None else ""
            self.num_output_tokens += len(token_ids)
        return RequestOutput(
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason="stop" if stop_string is not None or reason == "complete" else reason,
            stop_reason=output.stop_reason if stop_string is None else stop_string,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=output.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            prompt_logprobs=output.prompt_logprobs,
            embedding=output.embedding,
        )

    def _up_to_stop(self, token_ids: list[int], num_shown: int, *, is_last: bool) -> tuple[str, int, str | None]:
        """The text, how many of the tokens count, and the stop string that ends them."""
        texts: list[str] = []
        stop = None
        for count, token_id in enumerate(token_ids, start=1):
            self.num_output_tokens += 1
            if token_id in self._hidden:
                stop = self._add_hidden(self._hidden[token_id], texts)
            elif count <= num_shown:
                stop = self._add(self._stream.push(token_id), texts)
            if stop is not None:
                return "".join(texts), count, stop
        if is_last:
            rest, self._reasoning = self._undecided + self._stream.finish(), None
            stop = self._add(rest, texts)
            if stop is None:
                texts.append(self._stops.finish())
        return "".join(texts), len(token_ids), stop

    def _add(self, text: str, texts: list[str]) -> str | None:
        if (part := self._reasoning) is not None:
            self._undecided += text
            content = part.read(text)
            if not part.is_inside and not part.is_over:
                return None
            texts.append(self._undecided[: len(self._undecided) - len(content)])
            text, self._undecided = content, ""
        text, stop = self._stops.push(text, may_match=self.num_output_tokens >= self._min_tokens)
        texts.append(text)
        return stop

    def _add_hidden(self, text: str, texts: list[str]) -> str | None:
        if self.num_output_tokens < self._min_tokens:
            return None
        before, stop = self._stops.push_hidden(text)
        texts += [self._undecided, before] if stop is not None else []
        return stop


@lru_cache(maxsize=16)  # the choices of one request share theirs
def _hidden_ends(tokenizer: Tokenizer, stops: tuple[str, ...], hidden_ids: frozenset[int]) -> dict[int, str]:
    """The special tokens that the text leaves out and a stop string ends with, by their ids."""
    texts = {token_id: tokenizer.token(token_id) for token_id in hidden_ids}
    ends = {stop[-size:] for size in set(map(len, texts.values())) for stop in stops}
    return {token_id: text for token_id, text in texts.items() if text and text in ends}
