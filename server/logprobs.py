"""Log-probabilities in OpenAI's two shapes, and vLLM's for prompts."""

import codecs
from collections.abc import Callable, Sequence

from engine.messages import TokenLogprobs
from engine.text.tokenizer import Tokenizer
from server.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from server.protocol.common import PromptLogprob, PromptLogprobs
from server.protocol.completions import CompletionLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""

Spelling = Callable[[int], str]
_spelling_by_id: Spelling = "token_id:{}".format


def spelling(tokenizer: Tokenizer, as_token_ids: bool | None) -> Spelling:
    """How answers write a token: its text, or `token_id:7`."""
    if as_token_ids:
        return _spelling_by_id
    return lambda token_id: _text(tokenizer.token_bytes(token_id))


class CompletionTokens:
    """How /v1/completions writes the tokens of one choice, and where each of them begins in its text."""

    def __init__(self, tokenizer: Tokenizer, as_token_ids: bool | None = None) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._spell = _spelling_by_id if as_token_ids else self._text_or_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def logprobs(self, positions: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """The next tokens of the choice. The chosen token is among the top ones."""
        result = CompletionLogprobs([], [], [], [])
        for position in positions:
            result.tokens.append(self._spell(position.token_id))
            result.token_logprobs.append(max(LOWEST, position.logprob))
            result.top_logprobs.append(self._top(position))
            result.text_offset.append(self._begin(position.token_id))
        return result

    def echoed(
        self, prompt_token_ids: Sequence[int], positions: Sequence[TokenLogprobs], count: int
    ) -> CompletionLogprobs:
        """The tokens of a prompt. Nothing predicts the first; `positions` are the others', with `count` top ones."""
        token_id = prompt_token_ids[0]
        first = CompletionLogprobs([self._spell(token_id)], [None], [None], [self._begin(token_id)])
        rest = [TokenLogprobs(one.token_id, one.logprob, one.top[:count]) for one in positions]
        return first.joined(self.logprobs(rest))

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        """Likeliest first, each id once. Of ids with one spelling the chosen or else the likeliest has it."""
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
        """Characters that were complete before the token."""
        begin = self._offset
        self._offset += len(self._decoder.decode(self._bytes_of(token_id)))
        return begin


def prompt_logprobs(tokenizer: Tokenizer, positions: Sequence[TokenLogprobs], count: int) -> PromptLogprobs:
    """By token id, for each token of the prompt; null for the first."""
    result: PromptLogprobs = [None]
    for position in positions:
        ranked: dict[int, tuple[float, int | None]] = {
            token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(position.top[:count], start=1)
        }
        ranked.setdefault(position.token_id, (position.logprob, position.rank))
        result.append(
            {
                str(token_id): PromptLogprob(max(LOWEST, logprob), rank, _text(tokenizer.token_bytes(token_id)))
                for token_id, (logprob, rank) in ranked.items()
            }
        )
    return result


def chat_logprobs(spell: Spelling, tokenizer: Tokenizer, positions: Sequence[TokenLogprobs]) -> ChatLogprobs:
    content = []
    for position in positions:
        top = [
            TopLogprob(spell(token_id), max(LOWEST, logprob), list(tokenizer.token_bytes(token_id)))
            for token_id, logprob in position.top
        ]
        raw = list(tokenizer.token_bytes(position.token_id))
        content.append(TokenLogprob(spell(position.token_id), max(LOWEST, position.logprob), raw, top))
    return ChatLogprobs(content)


def _text(data: bytes) -> str:
    """A token may end within a character; such pieces show as U+FFFD."""
    return data.decode("utf-8", errors="replace")
