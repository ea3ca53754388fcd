"""POST /v1/responses, and what can be done with a stored response."""

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from configs.errors import ContextLengthExceeded, InvalidRequest, shown
from server.bodies import BodyRoute, ParsedRequest
from server.chat import render, start_chat
from server.documented import streamed
from server.errors import error_statuses
from server.openai.responses.conversion import chat_of, first_response, namespaces_of, offered_tools, read_items
from server.openai.responses.events import ResponseObject, ResponseWriter, StreamEvent
from server.openai.responses.models import Item, ResponsesRequest
from server.openai.responses.store import ResponseStore, StoredResponse
from server.serving import Serving, ServingOf
from server.shortening import DROPPED, without_oldest
from server.sse import EventStream, until_disconnect
from server.structured import STRICT

router = APIRouter(route_class=BodyRoute, responses=error_statuses())
_EVENTS = streamed(StreamEvent)


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: bool


@STRICT
class ItemList(TypedDict):
    object: Literal["list"]
    data: list[Item]
    first_id: str
    """This and `last_id` are empty when the page is."""
    last_id: str
    has_more: bool


async def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


StoreOf = Annotated[ResponseStore, Depends(_store)]


async def _stored(response_id: str, store: StoreOf) -> StoredResponse:
    """Raises `ResponseNotFound`, also for what another key has made."""
    return store.get(response_id)


StoredOf = Annotated[StoredResponse, Depends(_stored)]


@router.post("/v1/responses", response_model=ResponseObject, responses=_EVENTS)
async def create_response(
    body: ResponsesRequest, request: ParsedRequest, serving: ServingOf, store: StoreOf
) -> Response:
    """Answer a conversation, in the form of OpenAI's newer API."""
    stored, headers = await request.prepare(lambda: _start(serving, store, body, request))
    if body.background:
        stored.run_in_background(store)
    if body.stream:
        pieces = stored.replay(0) if body.background else stored.run(store)
        return EventStream(pieces, stored, headers, keep_alive=serving.config.sse_keep_alive_interval)
    if not body.background:
        await until_disconnect(request.receive, stored.run_to_end(store))
        store.add(stored)
        store.finish(stored)
    return _json(stored.encoded(), headers)


@router.post("/v1/responses/input_tokens", response_model=InputTokens)
async def count_input_tokens(
    body: ResponsesRequest, request: ParsedRequest, serving: ServingOf, store: StoreOf
) -> Response:
    """How many tokens the model would read for the body of /v1/responses."""

    async def count() -> InputTokens:
        items, _ = _conversation(store, body, request.ignored_fields)
        chat = chat_of(body, items, serving.config, request.ignored_fields)
        return {"object": "response.input_tokens", "input_tokens": len((await render(serving, chat)).token_ids)}

    return await request.answer(count)


@router.get("/v1/responses/{response_id}", response_model=ResponseObject, responses=_EVENTS)
async def retrieve_response(
    stored: StoredOf,
    serving: ServingOf,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
    include_obfuscation: bool = False,
) -> Response:
    """A stored response; with `stream`, its events behind number `starting_after`."""
    if not stream:
        return _json(stored.encoded())
    if not stored.kept_events:
        raise InvalidRequest("only a response with background and stream can be streamed later", param="stream")
    if include_obfuscation:
        raise InvalidRequest("include_obfuscation is not supported by this server", param="include_obfuscation")
    keep_alive = serving.config.sse_keep_alive_interval
    return EventStream(stored.replay(starting_after + 1), stored, keep_alive=keep_alive)


@router.delete("/v1/responses/{response_id}", response_model=DeletedResponse)
async def delete_response(stored: StoredOf, store: StoreOf) -> Response:
    """Forget a response, which ends if it still runs."""
    await store.cancel(stored)
    store.discard(stored)
    deleted: DeletedResponse = {"id": stored.id, "object": "response", "deleted": True}
    return _json(msgspec.json.encode(deleted))


@router.post("/v1/responses/{response_id}/cancel", response_model=ResponseObject)
async def cancel_response(stored: StoredOf, store: StoreOf) -> Response:
    """End a response that runs in the background."""
    if not stored.response["background"]:
        raise InvalidRequest("only a response with background can be cancelled; close the connection instead")
    await store.cancel(stored)
    return _json(stored.encoded())


@router.get("/v1/responses/{response_id}/input_items", response_model=ItemList)
async def list_input_items(
    stored: StoredOf,
    order: Literal["asc", "desc"] = "desc",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str = "",
) -> Response:
    """All that a response answers, that of earlier responses too. The page begins behind the item `after`."""
    items = stored.context[:: -1 if order == "desc" else 1]
    ids = [item["id"] or "" for item in items]
    if after and after not in ids:
        raise InvalidRequest(f"the response has no input item {shown(after)}", param="after")
    start = ids.index(after) + 1 if after else 0
    chosen = ids[start : start + limit] or [""]
    page: ItemList = {
        "object": "list",
        "data": items[start : start + limit],
        "first_id": chosen[0],
        "last_id": chosen[-1],
        "has_more": start + limit < len(items),
    }
    return _json(msgspec.json.encode(page))


def _conversation(store: ResponseStore, body: ResponsesRequest, passed_over: list[str]) -> tuple[list[Item], int]:
    """The items that the response answers, and their bytes of JSON."""
    items = read_items(body.input, store.item, passed_over)
    num_bytes = len(msgspec.json.encode(items))
    if body.previous_response_id is None:
        return items, num_bytes
    previous = store.get(body.previous_response_id, param="previous_response_id")
    if not previous.is_over:
        raise InvalidRequest("the previous response is still running", param="previous_response_id")
    return previous.conversation + items, previous.num_bytes + num_bytes


async def _start(
    serving: Serving, store: ResponseStore, body: ResponsesRequest, request: ParsedRequest
) -> tuple[StoredResponse, dict[str, str]]:
    """The response that begins, and headers of its answer."""
    items, num_bytes = _conversation(store, body, request.ignored_fields)
    chat = chat_of(body, items, serving.config, request.ignored_fields)
    headers: dict[str, str] = {}
    try:
        generation, answers = await start_chat(serving, chat, "resp_")
    except ContextLengthExceeded:
        shorter = await without_oldest(chat, serving) if body.truncation == "auto" else None
        if shorter is None:
            raise
        headers[DROPPED] = str(len(chat.messages) - len(shorter.messages))
        generation, answers = await start_chat(serving, shorter, "resp_")
    tools = offered_tools(body, [])
    response = first_response(body, generation, tools)
    writer = ResponseWriter(generation, answers, response, namespaces_of(tools), with_events=bool(body.stream))
    return StoredResponse(writer, items, num_bytes), headers


def _json(content: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(content, headers=headers, media_type="application/json")
