"""Log-probabilities in OpenAI's two shapes, and vLLM's for prompts."""

import codecs
from collections.abc import Callable, Sequence

from typing_extensions import TypedDict

from engine.messages import TokenLogprobs
from engine.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class PromptLogprob(TypedDict):
    logprob: float
    rank: int | None
    """1 for the likeliest."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt: the token itself and the likeliest ones by id; null for the first."""


class CompletionLogprobs(TypedDict):
    """Four lists with one entry per token: those of the prompt too, with `echo`."""

    tokens: list[str]
    """Texts; `bytes:\\xe2\\x80` for a part of a character."""
    token_logprobs: list[float | None]
    """Null for the first token of an echoed prompt, which nothing predicts."""
    top_logprobs: list[dict[str, float] | None]
    """Likeliest tokens as `tokens` writes them; where ids share a text, the chosen or the likeliest has it, others are
    `token_id:7`."""
    text_offset: list[int]
    """Characters that are complete before the token; the first token of the text begins at 0."""


Spelling = Callable[[int], str]
_spelling_by_id: Spelling = "token_id:{}".format


def spelling(tokenizer: Tokenizer, as_token_ids: bool | None = None) -> Spelling:
    """How answers write a token: its text, or `token_id:7`.

    A token may end within a character; such pieces show as U+FFFD.
    """
    if as_token_ids:
        return _spelling_by_id
    return lambda token_id: tokenizer.token_bytes(token_id).decode(errors="replace")


class CompletionTokens:
    """How /v1/completions writes the tokens of one choice, and where each of them begins in its text."""

    def __init__(self, tokenizer: Tokenizer, as_token_ids: bool | None = None) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._spell = _spelling_by_id if as_token_ids else self._text_or_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def logprobs(self, positions: Sequence[TokenLogprobs], unpredicted: int | None = None) -> CompletionLogprobs:
        """The next tokens of the choice, behind one that nothing predicts, where there is such."""
        token_ids = [one.token_id for one in positions]
        logprobs: list[float | None] = [max(LOWEST, one.logprob) for one in positions]
        top: list[dict[str, float] | None] = [self._top(one) for one in positions]
        if unpredicted is not None:
            token_ids, logprobs, top = [unpredicted, *token_ids], [None, *logprobs], [None, *top]
        return {
            "tokens": [self._spell(token_id) for token_id in token_ids],
            "token_logprobs": logprobs,
            "top_logprobs": top,
            "text_offset": [self._begin(token_id) for token_id in token_ids],
        }

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        """Likeliest first, each id once, the chosen one too. Of ids with one spelling the chosen or else the likeliest
        has it."""
        logprobs = dict(position.top)
        logprobs.setdefault(position.token_id, position.logprob)
        chosen = self._spell(position.token_id)
        top: dict[str, float] = {}
        for token_id, logprob in logprobs.items():
            name = self._spell(token_id)
            if token_id != position.token_id and (name == chosen or name in top):
                name = _spelling_by_id(token_id)
            top[name] = max(LOWEST, logprob)
        return top

    def _text_or_bytes(self, token_id: int) -> str:
        """As OpenAI writes pieces of characters, which are no text: `bytes:\\xe2\\x80`."""
        data = self._bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _begin(self, token_id: int) -> int:
        """Characters that were complete before the token, which is the next."""
        begin = self._offset
        self._offset += len(self._decoder.decode(self._bytes_of(token_id)))
        return begin


def prompt_logprobs(tokenizer: Tokenizer, positions: Sequence[TokenLogprobs], count: int) -> PromptLogprobs:
    """The log-probabilities of a prompt, with `count` likeliest tokens at each place."""
    spell = spelling(tokenizer)
    result: PromptLogprobs = [None]
    for position in positions:
        ranked: dict[int, tuple[float, int | None]] = {
            token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(position.top[:count], start=1)
        }
        ranked.setdefault(position.token_id, (position.logprob, position.rank))
        result.append(
            {
                str(token_id): {"logprob": max(LOWEST, logprob), "rank": rank, "decoded_token": spell(token_id)}
                for token_id, (logprob, rank) in ranked.items()
            }
        )
    return result


def chat_logprobs(
    tokenizer: Tokenizer, positions: Sequence[TokenLogprobs], as_token_ids: bool | None = None
) -> ChatLogprobs:
    """The log-probabilities of an answer's tokens, which `spelling` writes."""
    spell = spelling(tokenizer, as_token_ids)

    def written(token_id: int, logprob: float) -> TopLogprob:
        raw = list(tokenizer.token_bytes(token_id))
        return {"token": spell(token_id), "logprob": max(LOWEST, logprob), "bytes": raw}

    content: list[TokenLogprob] = [
        {**written(one.token_id, one.logprob), "top_logprobs": [written(*top) for top in one.top]} for one in positions
    ]
    return {"content": content, "refusal": None}
