"""Responses that can be asked for later and continued: in memory, bounded, gone with the process."""

import asyncio
from collections import OrderedDict

import msgspec

from configs.errors import RequestError, shown
from configs.settings import ServerConfig
from server.metrics.records import current_owner
from server.protocol.response_items import Item
from server.protocol.responses import Response
from server.responses.builder import ResponseBuilder
from server.responses.tape import Tape


class ResponseNotFound(RequestError):
    status = 404
    type = "invalid_request_error"

    def __init__(self, response_id: str, *, param: str | None = None) -> None:
        super().__init__(f"no response {shown(response_id)} is stored", param=param)


class StoredResponse:
    """A response with all that led to it, so that it outlives those that it continues."""

    def __init__(
        self, builder: ResponseBuilder, items: list[Item], previous: "StoredResponse | None", context: list[Item]
    ) -> None:
        """`items`: the request's own, with which `context` ends."""
        self._response: Response | None = None
        self._builder: ResponseBuilder | None = builder
        self.id = builder.response.id
        self.owner = current_owner()
        self.context = context
        """What the model answers."""
        self.num_bytes: int = (previous.num_bytes if previous else 0) + len(msgspec.json.encode(items))
        """Of JSON, with the context, though several responses may share it."""
        self.tape: Tape | None = None
        """The events of a background response that was asked to stream."""
        self.task: asyncio.Task[None] | None = None

    @property
    def response(self) -> Response:
        """As it is now."""
        if self._builder is not None:
            return self._builder.response
        assert self._response is not None
        return self._response

    @property
    def is_settled(self) -> bool:
        return self._builder is None

    @property
    def conversation(self) -> list[Item]:
        """Of a settled response: what the next one begins with."""
        return [*self.context, *self.response.output]

    def settle(self) -> None:
        """Nothing more will come; what was not over is cancelled."""
        if self._builder is not None:
            self._builder.cancel()
            self._response = self._builder.response
            self._builder = None
            self.num_bytes += len(msgspec.json.encode(self._response))
            self.num_bytes += self.tape.num_bytes if self.tape else 0


class ResponseStore:
    """Forgets what was not used for longest; what still runs stays."""

    def __init__(self, config: ServerConfig) -> None:
        self._max_responses = config.max_stored_responses
        self._max_bytes = config.max_stored_response_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._items: dict[tuple[str, str], Item] = {}
        """What the model said. Like the responses, items are kept by owner and id, so that nobody finds another's."""

    def get(self, response_id: str, *, param: str | None = None) -> StoredResponse:
        """Raises `ResponseNotFound`, which names `param`."""
        key = (current_owner(), response_id)
        if (stored := self._stored.get(key)) is None:
            raise ResponseNotFound(response_id, param=param)
        self._stored.move_to_end(key)
        return stored

    def item(self, item_id: str) -> Item | None:
        """An output item of a settled response."""
        return self._items.get((current_owner(), item_id))

    def add(self, response: StoredResponse) -> None:
        self._stored[response.owner, response.id] = response

    def settle(self, response: StoredResponse) -> None:
        """Nothing more will come. Without effect on a response that is not in the store, or settled already."""
        if (response.owner, response.id) in self._stored and not response.is_settled:
            response.settle()
            self._account(response)

    def discard(self, response: StoredResponse) -> None:
        if self._stored.pop((response.owner, response.id), None) is not None and response.is_settled:
            self._num_bytes -= response.num_bytes
            for item in response.response.output:
                assert item.id is not None, item
                del self._items[response.owner, item.id]

    async def cancel(self, response: StoredResponse) -> None:
        """End what runs in the background for a response; wait for its end."""
        if response.task is not None:
            response.task.cancel()
            await asyncio.wait({response.task})
            self.settle(response)  # a task that never began has not

    def _account(self, response: StoredResponse) -> None:
        self._num_bytes += response.num_bytes
        for item in response.response.output:
            assert item.id is not None, item
            self._items[response.owner, item.id] = item
        settled = (one for one in list(self._stored.values()) if one.is_settled)
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            if (oldest := next(settled, None)) is None:
                return
            self.discard(oldest)
