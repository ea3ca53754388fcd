"""Log-probabilities in OpenAI's two shapes."""

from engine.messages import TokenLogprobs
from server.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from server.protocol.completions import CompletionLogprobs
from server.serving import TokenizerFace

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


def completion_logprobs(
    tokenizer: TokenizerFace, positions: list[TokenLogprobs], first_offset: int
) -> CompletionLogprobs:
    """`first_offset`: characters before the first of `positions`. The chosen token is among the top ones."""
    result = CompletionLogprobs([], [], [], [])
    offset = first_offset
    for position in positions:
        text = _text(tokenizer.token_bytes(position.token_id))
        top: dict[str, float] = {}
        for token_id, logprob in [*position.top, (position.token_id, position.logprob)]:
            top.setdefault(_text(tokenizer.token_bytes(token_id)), max(LOWEST, logprob))
        result.tokens.append(text)
        result.token_logprobs.append(max(LOWEST, position.logprob))
        result.top_logprobs.append(top)
        result.text_offset.append(offset)
        offset += len(text)
    return result


def chat_logprobs(tokenizer: TokenizerFace, positions: list[TokenLogprobs]) -> ChatLogprobs:
    content = []
    for position in positions:
        data = tokenizer.token_bytes(position.token_id)
        top = [_top_logprob(tokenizer.token_bytes(token_id), logprob) for token_id, logprob in position.top]
        content.append(TokenLogprob(_text(data), max(LOWEST, position.logprob), list(data), top))
    return ChatLogprobs(content)


def _top_logprob(data: bytes, logprob: float) -> TopLogprob:
    return TopLogprob(_text(data), max(LOWEST, logprob), list(data))


def _text(data: bytes) -> str:
    """A token may end within a character; such pieces show as U+FFFD."""
    return data.decode("utf-8", errors="replace")
