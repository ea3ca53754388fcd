"""Responses that can be asked for later and continued: in memory, bounded, gone with the process."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from configs.errors import RequestError, shown
from configs.settings import ServerConfig
from engine.outputs import OutputBatch
from server.metrics.records import current_owner
from server.openai.responses.events import ResponseWriter
from server.openai.responses.models import Item


class ResponseNotFound(RequestError):
    status = 404
    type = "invalid_request_error"

    def __init__(self, response_id: str, *, param: str | None = None) -> None:
        super().__init__(f"no response {shown(response_id)} is stored", param=param)


class StoredEvents:
    """The events of a background response, and the `EventWriter` for what `read` gives. Event `n` has the sequence
    number `n`."""

    def __init__(self, events: list[bytes]) -> None:
        self._events = events
        self._is_whole = False
        self._grown = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._events))

    def extend(self, events: list[bytes], *, is_whole: bool = False) -> None:
        """`is_whole`: no more will come."""
        self._events += events
        self._is_whole = is_whole
        self._grown.set()
        self._grown = asyncio.Event()

    async def read(self, start: int) -> AsyncGenerator[bytes, None]:
        """From event `start` on, what is there and what comes."""
        while True:
            grown = self._grown
            if new := self._events[start:]:
                start += len(new)
                yield b"".join(new)
            elif self._is_whole:
                return
            else:
                await grown.wait()

    def events(self, piece: bytes) -> bytes:
        return piece

    def end(self) -> bytes:
        return b""

    def error(self, error: Exception) -> bytes:
        raise error  # those of the response are events


class StoredResponse:
    """A response with all that led to it, so that it outlives those that it continues."""

    def __init__(
        self,
        writer: ResponseWriter,
        items: list[Item],
        previous: "StoredResponse | None",
        context: list[Item],
    ) -> None:
        """`items`: the request's own, with which `context` ends."""
        self._writer: ResponseWriter | None = writer
        self.response = writer.response
        """The response without the item that is open."""
        self.id = self.response["id"]
        self.owner = current_owner()
        self.context = context
        """All items that the model answers."""
        self.num_bytes: int = (previous.num_bytes if previous else 0) + len(msgspec.json.encode(items))
        """Bytes of JSON, those of the context too, though several responses may share it."""
        self.events: StoredEvents | None = None
        """A background response that was asked to stream has them."""
        self.task: asyncio.Task[None] | None = None

    def encoded(self) -> bytes:
        """JSON of the response as it is now."""
        return self._writer.encoded() if self._writer else msgspec.json.encode(self.response)

    @property
    def is_over(self) -> bool:
        return self._writer is None

    @property
    def conversation(self) -> list[Item]:
        """All items that a response begins with that continues this one, which is over."""
        return [*self.context, *self.response["output"]]

    async def batches(self, writer: ResponseWriter, store: "ResponseStore | None") -> AsyncGenerator[OutputBatch, None]:
        """What the engine gives to the writer, while the store has the response. Raises what the engine raises."""
        if store is not None:
            store.add(self)
        try:
            async with aclosing(writer.generation.run()) as batches:
                async for batch in batches:
                    yield batch
        except Exception as error:
            if writer.has_begun:
                writer.fail(error)
                if self.events is not None:
                    self.events.extend(writer.take())
            raise
        finally:
            if store is not None and writer.has_begun:
                store.finish(self)
            elif store is not None:  # nobody knows its id
                store.discard(self)

    async def run(self, writer: ResponseWriter, store: "ResponseStore") -> None:
        """Write the response, and store its events; a background task runs this."""
        events = self.events or StoredEvents([])
        try:
            async with aclosing(self.batches(writer, store)) as batches:
                try:
                    async for batch in batches:
                        writer.push(batch)
                        events.extend(writer.take())
                except Exception as error:  # its last events and its status tell of it
                    writer.fail(error)
                    events.extend(writer.take())
        finally:
            events.extend([], is_whole=True)

    def finish(self) -> None:
        """Nothing more will come; what was not over is cancelled."""
        if self._writer is not None:
            self._writer.cancel()
            self.num_bytes += len(self._writer.whole) + (self.events.num_bytes if self.events else 0)
            self._writer = None


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
        """Raises `ResponseNotFound`, which names `param`."""
        key = (current_owner(), response_id)
        if (stored := self._stored.get(key)) is None:
            raise ResponseNotFound(response_id, param=param)
        self._stored.move_to_end(key)
        return stored

    def item(self, item_id: str) -> Item | None:
        """An output item of a response that is over."""
        return self._items.get((current_owner(), item_id))

    def add(self, response: StoredResponse) -> None:
        self._stored[response.owner, response.id] = response

    def finish(self, response: StoredResponse) -> None:
        """Nothing more will come. Without effect on a response that is not in the store, or over already."""
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
