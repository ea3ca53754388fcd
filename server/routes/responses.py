"""POST /v1/responses, and what can be done with a stored response."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from configs.errors import ContextLengthExceeded, InvalidRequest, shown
from configs.settings import ServerConfig
from engine.input_processor import RenderedChat
from server.chat import Chat, render, start_chat
from server.convert.response_items import read_items
from server.convert.responses import chat_of, first_snapshot
from server.convert.shortening import DROPPED, without_oldest
from server.disconnect import until_disconnect
from server.generation import Generation
from server.parsing import BodyParser, ignored_header, query_of
from server.protocol.queries import InputItemsQuery, RetrieveQuery
from server.protocol.response_items import ItemList
from server.protocol.responses import DeletedResponse, InputTokens, ResponsesRequest
from server.responses.builder import ResponseBuilder
from server.responses.running import EventsWriter, TapeWriter, in_background, told, whole
from server.responses.store import ResponseStore, StoredResponse
from server.responses.tape import Tape
from server.serving import Serving, serving_of
from server.sse import EventStream


class ResponsesRoutes:
    """Methods are called with a request; they raise `RequestError`."""

    def __init__(self, config: ServerConfig) -> None:
        self.parser = BodyParser(ResponsesRequest, config)
        self.keep_alive = config.sse_keep_alive_interval
        self.store = ResponseStore(config)

    async def create(self, request: Request) -> HttpResponse:
        serving = serving_of(request)
        serving.check_alive()
        parsed = await self.parser.parse(request)
        body, ignored = parsed.body, parsed.ignored_fields
        serving.check_model(body.model)
        builder, generation, stored, headers = await serving.preparation.prepare(
            request, lambda: self._start(serving, body, ignored)
        )
        if body.background:
            return self._background(builder, generation, stored, body, headers)
        if body.stream:
            events = told(builder, generation, None if body.store is False else self.store, stored)
            return EventStream(events, EventsWriter(builder), headers, keep_alive=self.keep_alive)
        response = await until_disconnect(request.receive, whole(builder, generation))
        if body.store is not False:
            self.store.add(stored)
            self.store.settle(stored)
        return _json(response, headers)

    async def input_tokens(self, request: Request) -> HttpResponse:
        """How many tokens the model would read for the body of `create`."""
        serving = serving_of(request)
        serving.check_alive()
        parsed = await self.parser.parse(request)
        body = parsed.body
        serving.check_model(body.model)
        previous, ignored = self._previous(body), parsed.ignored_fields

        async def start() -> tuple[RenderedChat, Chat]:
            items = read_items(body.input, self.store.item, ignored)
            chat = chat_of(body, [*(previous.conversation if previous else []), *items], serving.config)
            return await render(serving, chat), chat

        rendered, chat = await serving.preparation.prepare(request, start)
        return _json(InputTokens(len(rendered.token_ids)), ignored_header(ignored + chat.passed_over))

    async def retrieve(self, request: Request) -> HttpResponse:
        """With `stream`, the events from `starting_after` on."""
        stored, query = self._stored(request), query_of(request, RetrieveQuery)
        if not query.stream:
            return _json(stored.response)
        if stored.tape is None:
            raise InvalidRequest("only a response with background and stream can be streamed later", param="stream")
        if query.include_obfuscation:
            raise InvalidRequest("include_obfuscation is not supported by this server", param="include_obfuscation")
        return self._replay(stored.tape, query.starting_after + 1)

    async def delete(self, request: Request) -> HttpResponse:
        stored = self._stored(request)
        await self.store.cancel(stored)
        self.store.discard(stored)
        return _json(DeletedResponse(stored.id))

    async def cancel(self, request: Request) -> HttpResponse:
        stored = self._stored(request)
        if not stored.response.background:
            raise InvalidRequest("only a response with background can be cancelled; close the connection instead")
        await self.store.cancel(stored)
        return _json(stored.response)

    async def input_items(self, request: Request) -> HttpResponse:
        """All that the response answers, that of earlier responses too; the newest first unless `order` is asc."""
        query = query_of(request, InputItemsQuery)
        items = self._stored(request).context[:: -1 if query.order == "desc" else 1]
        start = 0
        if query.after:
            start = next((index for index, item in enumerate(items, start=1) if item.id == query.after), -1)
            if start < 0:
                raise InvalidRequest(f"the response has no input item {shown(query.after)}", param="after")
        page = items[start : start + query.limit]
        first, last = (page[0].id or "", page[-1].id or "") if page else ("", "")
        return _json(ItemList(data=page, first_id=first, last_id=last, has_more=start + query.limit < len(items)))

    async def _start(
        self, serving: Serving, body: ResponsesRequest, ignored: list[str]
    ) -> tuple[ResponseBuilder, Generation, StoredResponse, dict[str, str]]:
        """Start an answer; its headers name what is `ignored` and what is passed over."""
        previous = self._previous(body)
        items = read_items(body.input, self.store.item, ignored)
        context = [*(previous.conversation if previous else []), *items]
        chat = chat_of(body, context, serving.config)
        headers = ignored_header(ignored + chat.passed_over)
        try:
            generation, answers = await start_chat(serving, chat, "resp_")
        except ContextLengthExceeded:
            shorter = await without_oldest(chat, serving) if body.truncation == "auto" else None
            if shorter is None:
                raise
            headers[DROPPED] = str(len(chat.messages) - len(shorter.messages))
            generation, answers = await start_chat(serving, shorter, "resp_")
        builder = ResponseBuilder(generation, answers, first_snapshot(body, generation))
        return builder, generation, StoredResponse(builder, items, previous, context), headers

    def _previous(self, body: ResponsesRequest) -> StoredResponse | None:
        if body.previous_response_id is None:
            return None
        previous = self.store.get(body.previous_response_id, param="previous_response_id")
        if not previous.is_settled:
            raise InvalidRequest("the previous response is still running", param="previous_response_id")
        return previous

    def _background(
        self,
        builder: ResponseBuilder,
        generation: Generation,
        stored: StoredResponse,
        body: ResponsesRequest,
        headers: dict[str, str],
    ) -> HttpResponse:
        generation.check_room()
        events = builder.begin()
        self.store.add(stored)
        if body.stream:
            stored.tape = Tape()
            stored.tape.write(events)
        response = stored.response
        stored.task = generation.serving.in_background(in_background(builder, generation, self.store, stored))
        return _json(response, headers) if stored.tape is None else self._replay(stored.tape, 0, headers)

    def _replay(self, tape: Tape, start: int, headers: dict[str, str] | None = None) -> HttpResponse:
        return EventStream(tape.read(start), TapeWriter(), headers, keep_alive=self.keep_alive)

    def _stored(self, request: Request) -> StoredResponse:
        return self.store.get(request.path_params["response_id"])


def _json(content: Any, headers: dict[str, str] | None = None) -> HttpResponse:
    return HttpResponse(msgspec.json.encode(content), headers=headers, media_type="application/json")
