"""POST /tokenize, /detokenize and /apply-template."""

from configs.errors import InvalidRequest
from server.convert.tokenization import check_chat_fields, rendered_chat
from server.protocol.tokenization import (
    ContentTokens,
    DetokenizeRequest,
    DetokenizeResponse,
    TemplateRequest,
    TemplateResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenPiece,
)
from server.serving import Serving


async def tokenize(serving: Serving, body: TokenizeRequest) -> TokenizeResponse | ContentTokens:
    tokenizer = serving.engine.tokenizer
    token_ids = await _token_ids(serving, body)
    if body.content is None:
        if body.with_pieces:
            raise InvalidRequest("with_pieces needs content", param="with_pieces")
        spellings = [tokenizer.token(one) for one in token_ids] if body.return_token_strs else None
        return TokenizeResponse(len(token_ids), serving.engine.info.max_model_len, token_ids, spellings)
    if body.return_token_strs:
        raise InvalidRequest("return_token_strs needs prompt or messages", param="return_token_strs")
    if not body.with_pieces:
        return ContentTokens([*token_ids])
    return ContentTokens([TokenPiece(one, _piece(tokenizer.token_bytes(one))) for one in token_ids])


async def detokenize(serving: Serving, body: DetokenizeRequest) -> DetokenizeResponse:
    vocab_size = serving.engine.info.vocab_size
    for token_id in (min(body.tokens, default=0), max(body.tokens, default=0)):
        if not 0 <= token_id < vocab_size:
            message = f"token id {token_id} is outside the vocabulary of {vocab_size} tokens"
            raise InvalidRequest(message, param="tokens")
    text = await serving.engine.decode(body.tokens, skip_special_tokens=False)
    return DetokenizeResponse(prompt=text, content=text)


async def apply_template(serving: Serving, body: TemplateRequest) -> TemplateResponse:
    opened = body.add_generation_prompt
    rendered = await rendered_chat(serving, body, add_generation_prompt=opened, tools=body.tools)
    return TemplateResponse(rendered.text)


async def _token_ids(serving: Serving, body: TokenizeRequest) -> list[int]:
    special = body.add_special if body.add_special_tokens is None else body.add_special_tokens
    if body.messages is not None:
        opened = body.add_generation_prompt
        rendered = await rendered_chat(
            serving, body, add_generation_prompt=opened, tools=body.tools, special=bool(special)
        )
        return rendered.token_ids
    check_chat_fields(body)
    text = body.prompt if body.prompt is not None else body.content
    assert text is not None, body
    default = body.prompt is not None
    return await serving.engine.encode(text, add_special_tokens=default if special is None else special)


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
