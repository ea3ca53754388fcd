"""Responses that can be asked for later and continued: in memory, bounded, gone with the process."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from configs.errors import RequestError, shown
from configs.settings import ServerConfig
from server.metrics.records import current_owner
from server.openai.responses.events import ResponseWriter
from server.openai.responses.models import Item


class ResponseNotFound(RequestError):
    status = 404
    type = "invalid_request_error"

    def __init__(self, response_id: str, *, param: str | None = None) -> None:
        super().__init__(f"no response {shown(response_id)} is stored", param=param)


class StoredResponse:
    """A response with all that led to it, so that it outlives those that it continues; and the `EventWriter` for what
    `run` and `replay` give."""

    def __init__(self, writer: ResponseWriter, context: list[Item], num_bytes: int) -> None:
        """`context` has all items that the model answers, which take so many bytes of JSON."""
        self._writer: ResponseWriter | None = writer
        self.response = writer.response
        self.id = self.response["id"]
        self.owner = current_owner()
        self.context = context
        self.num_bytes = num_bytes
        """Those of the context too, though several responses may share it."""
        self.kept_events = writer.events if self.response["background"] else []
        """Of a background response that was asked to stream. Event `n` has the sequence number `n`."""
        self.task: asyncio.Task[None] | None = None
        """What runs in the background."""
        self._grown = asyncio.Event()

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

    async def run(self, store: "ResponseStore") -> AsyncGenerator[bytes, None]:
        """Write the response; its events, as they come, but those that are kept. What is streamed is stored meanwhile.

        An error is the last event. It is raised where there was none before, unless this runs in the background.
        """
        assert self._writer is not None, self.id
        writer, has_begun = self._writer, self.response["background"]
        if writer.events:
            store.add(self)
        try:
            async with aclosing(writer.generation.run()) as batches:
                async for batch in batches:
                    writer.push(batch)
                    events = self._take_events(writer)
                    has_begun = has_begun or bool(events)
                    yield events
        except Exception as error:
            if not has_begun:
                raise
            writer.fail(error)
            yield self._take_events(writer)
        finally:
            if has_begun:
                store.finish(self)
            else:  # nobody knows its id
                store.discard(self)

    def _take_events(self, writer: ResponseWriter) -> bytes:
        if self.response["background"]:
            self._grown.set()
            self._grown = asyncio.Event()
            return b""
        events = b"".join(writer.events)
        writer.events.clear()
        return events

    async def run_to_end(self, store: "ResponseStore") -> None:
        async with aclosing(self.run(store)) as pieces:
            async for _ in pieces:
                pass

    def run_in_background(self, store: "ResponseStore") -> None:
        """Raises `QueueFull`."""
        assert self._writer is not None, self.id
        generation = self._writer.generation
        generation.check_room()
        store.add(self)
        self.task = generation.serving.in_background(self.run_to_end(store))

    async def replay(self, start: int) -> AsyncGenerator[bytes, None]:
        """From event `start` on, what is kept and what comes."""
        while True:
            grown = self._grown
            if new := self.kept_events[start:]:
                start += len(new)
                yield b"".join(new)
            elif self.is_over:
                return
            else:
                await grown.wait()

    def events(self, piece: bytes) -> bytes:
        return piece

    def end(self) -> bytes:
        return b""

    def error(self, error: Exception) -> bytes:
        raise error  # those of the response are events

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
        """Without effect on a response that is not to be stored."""
        if response.response["store"]:
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
