"""Texts, token ids and prompts into each other: POST /tokenize, /detokenize and /apply-template."""

from typing import Annotated, Any, NotRequired

from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.responses import Response
from typing_extensions import TypedDict

from configs.errors import InvalidRequest
from server.bodies import BodyRoute, ModelRequest, ParsedRequest, Unsupported, one_of
from server.documented import given
from server.errors import error_statuses
from server.openai.chat import ChatPromptFields
from server.openai.messages import Messages
from server.serving import Serving, ServingOf

router = APIRouter(route_class=BodyRoute, tags=["Tokens"], responses=error_statuses())


class TokenizeRequest(ChatPromptFields):
    """vLLM's `prompt` or `messages`; llama.cpp's `content`, whose answer holds `tokens` alone."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [given("prompt"), given("messages"), given("content")]})

    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    """Put the tokenizer's own tokens, such as the beginning of sequence, around it (default: around `prompt` alone)."""
    add_special: bool | None = None
    """The same as add_special_tokens."""
    return_token_strs: bool | None = None
    """Of `prompt` and `messages`: add the tokens' spellings in the vocabulary."""
    with_pieces: bool | None = None
    """Of `content`: answer with objects of id and piece."""
    parse_special: Annotated[Any, Unsupported((True,))] = None
    media_io_kwargs: Annotated[Any, Unsupported(({},))] = None


class TokenPiece(TypedDict):
    id: int
    piece: str | list[int]
    """The token's text, or its bytes where they are not whole characters."""


class TokenizeResponse(TypedDict):
    """Of `content`, as llama.cpp's, the tokens alone."""

    tokens: list[int] | list[TokenPiece]
    count: NotRequired[int]
    max_model_len: NotRequired[int]
    token_strs: NotRequired[list[str] | None]


class DetokenizeRequest(ModelRequest):
    tokens: list[Annotated[int, Field(ge=0)]]


class TemplateRequest(ChatPromptFields):
    messages: Messages
    media_io_kwargs: Annotated[Any, Unsupported(({},))] = None


class TemplateResponse(TypedDict):
    prompt: str


class DetokenizeResponse(TemplateResponse):
    """The text under vLLM's name and under llama.cpp's."""

    content: str


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(body: TokenizeRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Token ids of a text or of a chat's prompt."""
    one_of(body, "prompt", "messages", "content")
    return await request.answer(lambda: _tokenize(serving, body))


async def _tokenize(serving: Serving, body: TokenizeRequest) -> TokenizeResponse:
    tokenizer = serving.engine.tokenizer
    as_llama_cpp = body.content is not None
    unfit, needed = ("return_token_strs", "prompt or messages") if as_llama_cpp else ("with_pieces", "content")
    if getattr(body, unfit):
        raise InvalidRequest(f"{unfit} needs {needed}", param=unfit)
    special = body.add_special if body.add_special_tokens is None else body.add_special_tokens
    token_ids = await body.prompt_of_messages(serving, special=bool(special))
    if token_ids is None:
        special = not as_llama_cpp if special is None else special
        token_ids = await serving.engine.encode(body.prompt or body.content or "", add_special_tokens=special)
    if not as_llama_cpp:
        spellings = [tokenizer.token(one) for one in token_ids] if body.return_token_strs else None
        max_model_len = serving.engine.info.max_model_len
        return {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": spellings}
    if not body.with_pieces:
        return {"tokens": token_ids}
    pieces: list[TokenPiece] = [{"id": one, "piece": _piece(tokenizer.token_bytes(one))} for one in token_ids]
    return {"tokens": pieces}


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


@router.post("/detokenize", response_model=DetokenizeResponse)
async def detokenize(body: DetokenizeRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """The text of token ids."""

    async def answer() -> DetokenizeResponse:
        vocab_size = serving.engine.info.vocab_size
        if (largest := max(body.tokens, default=0)) >= vocab_size:
            message = f"token id {largest} is outside the vocabulary of {vocab_size} tokens"
            raise InvalidRequest(message, param="tokens")
        text = await serving.engine.decode(body.tokens, skip_special_tokens=False)
        return {"prompt": text, "content": text}

    return await request.answer(answer)


@router.post("/apply-template", response_model=TemplateResponse)
async def apply_template(body: TemplateRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """A chat's prompt."""

    async def answer() -> TemplateResponse:
        return {"prompt": (await body.rendered(serving)).text}

    return await request.answer(answer)
