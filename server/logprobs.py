"""Log-probabilities in OpenAI's two shapes, and vLLM's for prompts."""

from collections.abc import Callable, Sequence

from engine.messages import TokenLogprobs
from server.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from server.protocol.common import PromptLogprob, PromptLogprobs
from server.protocol.completions import CompletionLogprobs
from server.serving import TokenizerFace

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""

Spelling = Callable[[int], str]


def spelling(tokenizer: TokenizerFace, as_token_ids: bool | None) -> Spelling:
    """How answers write a token: its text, or `token_id:7`."""
    if as_token_ids:
        return "token_id:{}".format
    return lambda token_id: _text(tokenizer.token_bytes(token_id))


def completion_logprobs(spell: Spelling, positions: Sequence[TokenLogprobs], first_offset: int) -> CompletionLogprobs:
    """`first_offset`: characters before the first of `positions`. The chosen token is among the top ones."""
    result = CompletionLogprobs([], [], [], [])
    offset = first_offset
    for position in positions:
        text = spell(position.token_id)
        top: dict[str, float] = {}
        for token_id, logprob in [*position.top, (position.token_id, position.logprob)]:
            top.setdefault(spell(token_id), max(LOWEST, logprob))
        result.tokens.append(text)
        result.token_logprobs.append(max(LOWEST, position.logprob))
        result.top_logprobs.append(top)
        result.text_offset.append(offset)
        offset += len(text)
    return result


def echoed_logprobs(
    spell: Spelling, prompt_token_ids: Sequence[int], positions: Sequence[TokenLogprobs], count: int
) -> CompletionLogprobs:
    """Of a prompt's tokens: nothing predicts the first, `positions` are those of the others with `count` top ones."""
    first = CompletionLogprobs([spell(prompt_token_ids[0])], [None], [None], [0])
    rest = [TokenLogprobs(one.token_id, one.logprob, one.top[:count]) for one in positions]
    return first.joined(completion_logprobs(spell, rest, 0))


def prompt_logprobs(tokenizer: TokenizerFace, positions: Sequence[TokenLogprobs], count: int) -> PromptLogprobs:
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


def chat_logprobs(spell: Spelling, tokenizer: TokenizerFace, positions: Sequence[TokenLogprobs]) -> ChatLogprobs:
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
