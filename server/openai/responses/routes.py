"""POST /v1/responses, and responses that can be asked for later and continued, in a bounded store in memory."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from configs.errors import InvalidRequest, shown
from configs.settings import ServerConfig
from server.bodies import BodyRoute, ParsedRequest
from server.chat import render
from server.documented import streamed
from server.errors import error_statuses
from server.generation import Generation
from server.metrics.records import current_owner
from server.openai.responses.conversion import chat_of, first_response, namespaces_of, offered_tools, read_items
from server.openai.responses.events import ResponseWriter, StreamEvent
from server.openai.responses.models import Item, ResponseObject, ResponsesRequest
from server.serving import ServingOf
from server.shortening import start_shortened, without_oldest
from server.sse import EventStream, EventWriter, until_disconnect
from server.structured import OPEN

router = APIRouter(route_class=BodyRoute, tags=["OpenAI"], responses=error_statuses())
_EVENTS = streamed(StreamEvent)


class ResponseNotFound(InvalidRequest):
    status = 404


class StoredResponse(EventWriter):
    """A response with all that led to it, so that it outlives those that it continues. It writes what `run` and
    `replay` give, whose last events tell of an error."""

    def __init__(self, writer: ResponseWriter, context: list[Item], num_bytes: int) -> None:
        """`context` has all items that the model answers, which take so many bytes of JSON."""
        self._writer: ResponseWriter | None = writer
        self.response = writer.response
        self.id: str = self.response["id"]
        self.owner = current_owner()
        self.context = context
        self.num_bytes = num_bytes
        """Those of the context too, though several responses may share it."""
        self.kept_events = writer.take() if self.response["background"] else []
        """Of a background response that was asked to stream. Event `n` has the sequence number `n`."""
        self.task: asyncio.Task[None] | None = None
        """What runs in the background."""
        self._grown = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self._writer is None

    def encoded(self) -> bytes:
        """JSON of the response as it is now."""
        return self._writer.encoded() if self._writer else msgspec.json.encode(self.response)

    async def run(self, store: "ResponseStore") -> AsyncGenerator[list[bytes], None]:
        """Write the response, and yield what events each batch of tokens adds.

        A stream is in `store` meanwhile, as what runs in the background is, and is finished there at the end. An error
        is the last event; it is raised where nobody has seen an event yet, or ever will.
        """
        assert self._writer is not None, self.id
        writer, has_begun = self._writer, self.response["background"]
        if writer.with_events:
            store.add(self)
        try:
            async with aclosing(writer.generation.run()) as batches:
                async for batch in batches:
                    writer.push(batch)
                    events = writer.take()
                    has_begun = has_begun or bool(events)
                    yield events
        except Exception as error:
            if not has_begun:
                raise
            writer.fail(error)
            yield writer.take()
        finally:
            if has_begun:
                store.finish(self)
            else:  # nobody knows its id
                store.discard(self)

    async def run_to_end(self, store: "ResponseStore") -> None:
        """Write the response, and keep its events."""
        async with aclosing(self.run(store)) as pieces:
            async for events in pieces:
                self.kept_events += events
                self._grown.set()
                self._grown = asyncio.Event()

    async def replay(self, start: int) -> AsyncGenerator[list[bytes], None]:
        """Yield the events from number `start` on: those that are kept, then those that come."""
        while True:
            grown = self._grown
            if new := self.kept_events[start:]:
                start += len(new)
                yield new
            elif self.is_over:
                return
            else:
                await grown.wait()

    def events(self, events: list[bytes]) -> bytes:
        return b"".join(events)

    def finish(self) -> None:
        """Nothing more will come; what was not over is cancelled."""
        if self._writer is not None:
            self._writer.cancel()
            self._writer = None
            self.num_bytes += len(self.encoded()) + sum(map(len, self.kept_events))
            self._grown.set()


class ResponseStore:
    """Forgets what was not used for longest; what still runs stays. Keys are owner and id: nobody finds another's."""

    def __init__(self, config: ServerConfig) -> None:
        self._max_responses = config.max_stored_responses
        self._max_bytes = config.max_stored_response_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._items: dict[tuple[str, str], Item] = {}
        """Output items of responses that are over."""

    def get(self, response_id: str, *, param: str | None = None) -> StoredResponse:
        """The stored response of this id. Raises `ResponseNotFound`, which names `param`."""
        key = (current_owner(), response_id)
        if (stored := self._stored.get(key)) is None:
            raise ResponseNotFound(f"no response {shown(response_id)} is stored", param=param)
        self._stored.move_to_end(key)
        return stored

    def item(self, item_id: str) -> Item | None:
        """The item of this id in the output of a response that is over."""
        return self._items.get((current_owner(), item_id))

    def add(self, response: StoredResponse) -> None:
        """Keep a response, unless it is not to be stored."""
        if response.response["store"]:
            self._stored[response.owner, response.id] = response

    def finish(self, response: StoredResponse) -> None:
        """Finish a response that is in the store, unless it is over. Those used least recently make room for it."""
        if (response.owner, response.id) not in self._stored or response.is_over:
            return
        response.finish()
        self._num_bytes += response.num_bytes
        self._items |= {(response.owner, item["id"] or ""): item for item in response.response["output"]}
        over = (one for one in list(self._stored.values()) if one.is_over)
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            if (oldest := next(over, None)) is None:
                return
            self.discard(oldest)

    def discard(self, response: StoredResponse) -> None:
        """Forget a response, which may still run."""
        if self._stored.pop((response.owner, response.id), None) is not None and response.is_over:
            self._num_bytes -= response.num_bytes
            for item in response.response["output"]:
                del self._items[response.owner, item["id"] or ""]

    async def cancel(self, response: StoredResponse) -> None:
        """End what runs in the background for a response; wait for its end."""
        if response.task is not None:
            response.task.cancel()
            await asyncio.wait({response.task})
            self.finish(response)  # a task that never began has not


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: bool


@OPEN
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
    """The response with the id in the path. Raises `ResponseNotFound`, also for what another key has made."""
    return store.get(response_id)


StoredOf = Annotated[StoredResponse, Depends(_stored)]


@router.post("/v1/responses", response_model=ResponseObject, responses=_EVENTS)
async def create_response(
    body: ResponsesRequest, request: ParsedRequest, serving: ServingOf, store: StoreOf
) -> Response:
    """Answer a conversation, in the form of OpenAI's newer API."""

    async def start() -> tuple[Generation, StoredResponse, dict[str, str]]:
        items, num_bytes = _conversation(store, body, request.ignored_fields)
        chat = chat_of(body, items, serving.config, request.ignored_fields)
        shorten = without_oldest if body.truncation == "auto" else None
        generation, answers, headers = await start_shortened(serving, chat, "resp_", shorten)
        tools = offered_tools(body, [])
        response = first_response(body, generation, tools)
        writer = ResponseWriter(generation, answers, response, namespaces_of(tools), with_events=bool(body.stream))
        return generation, StoredResponse(writer, items, num_bytes), headers

    generation, stored, headers = await request.prepare(start)
    if body.background:
        generation.check_room()
        store.add(stored)
        stored.task = serving.in_background(stored.run_to_end(store))
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
    items = read_items(body, store.item, passed_over)
    num_bytes = len(msgspec.json.encode(items))
    if body.previous_response_id is None:
        return items, num_bytes
    previous = store.get(body.previous_response_id, param="previous_response_id")
    if not previous.is_over:
        raise InvalidRequest("the previous response is still running", param="previous_response_id")
    return [*previous.context, *previous.response["output"], *items], previous.num_bytes + num_bytes


def _json(content: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(content, headers=headers, media_type="application/json")
