"""Responses that run: to a client that waits for the whole, to one that reads along, or in the background."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from server.generation import Generation
from server.protocol.response_events import Event
from server.protocol.responses import Response
from server.responses.builder import ResponseBuilder
from server.responses.store import ResponseStore, StoredResponse
from server.responses.tape import encoded


async def pushed(builder: ResponseBuilder, generation: Generation) -> AsyncGenerator[list[Event], None]:
    """The events as they come; raises what the engine raises."""
    async with aclosing(generation.run()) as batches:
        async for batch in batches:
            for _, output in batch:
                yield builder.push(output)


async def whole(builder: ResponseBuilder, generation: Generation) -> Response:
    async with aclosing(pushed(builder, generation)) as steps:
        async for _ in steps:
            pass
    return builder.response


async def told(
    builder: ResponseBuilder, generation: Generation, store: ResponseStore | None, stored: StoredResponse
) -> AsyncGenerator[list[Event], None]:
    """As `pushed`; an error after the first event is told by the last ones. `store` has the response meanwhile."""
    if store is not None:
        store.add(stored)
    try:
        async with aclosing(pushed(builder, generation)) as steps:
            async for events in steps:
                yield events
    except Exception as error:
        if not builder.has_begun:
            raise
        yield builder.fail(error)
    finally:
        if store is not None:
            store.settle(stored)
            if not builder.has_begun:  # nobody knows its id
                store.discard(stored)


async def in_background(
    builder: ResponseBuilder, generation: Generation, store: ResponseStore, stored: StoredResponse
) -> None:
    """`builder` has begun."""
    try:
        async with aclosing(told(builder, generation, store, stored)) as steps:
            async for events in steps:
                if stored.tape:
                    stored.tape.write(events)
    finally:
        if stored.tape:
            stored.tape.end()


class EventsWriter:
    """An `EventWriter` for what `told` gives."""

    def __init__(self, builder: ResponseBuilder) -> None:
        self.builder = builder

    def events(self, item: list[Event]) -> bytes:
        return b"".join(encoded(item))

    def end(self) -> bytes:
        return b""

    def error(self, error: Exception) -> bytes:
        """Of a response that has not begun, on a connection that was kept alive by comments."""
        return b"".join(encoded(self.builder.fail(error)))


class TapeWriter:
    """An `EventWriter` for what `Tape.read` gives."""

    def events(self, item: bytes) -> bytes:
        return item

    def end(self) -> bytes:
        return b""

    def error(self, error: Exception) -> bytes:
        raise error  # a tape holds its errors
