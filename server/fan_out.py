"""Several choices at once: one stream of outputs from many generators."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from configs.errors import RequestFailed
from engine.outputs import RequestOutput

Batch = list[tuple[int, RequestOutput]]
"""Outputs that are ready together, each with the index of its choice."""


async def merge(streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> AsyncGenerator[Batch, None]:
    """Yield what is ready, in the order of arrival. Closing it, or an error of one stream, closes all of them.

    At most one output per choice waits here: what a slow reader leaves is merged by the engine's mailboxes.
    """
    batches = _single(streams[0]) if len(streams) == 1 else _many(streams)
    async with aclosing(batches):
        async for batch in batches:
            for _, output in batch:
                if output.finish_reason in ("abort", "error"):
                    raise RequestFailed(f"the request ended early ({output.finish_reason})")
            yield batch


async def _single(stream: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[Batch, None]:
    async with aclosing(stream):
        async for output in stream:
            yield [(0, output)]


async def _many(streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> AsyncGenerator[Batch, None]:
    ready: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(len(streams))

    async def pump(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    await ready.put((index, output))
        except Exception as error:
            await ready.put((index, error))
        else:
            await ready.put((index, None))

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(pumps)
        while running:
            items = [await ready.get()]
            while not ready.empty():
                items.append(ready.get_nowait())
            batch: Batch = []
            for index, item in items:
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    batch.append((index, item))
            if batch:
                yield batch
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
