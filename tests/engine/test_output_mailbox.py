"""What waits for a reader: merged, complete, in order."""

import asyncio
import random
import tracemalloc

import pytest

from configs.errors import EngineDead
from engine.messages import TokenLogprobs, TokenOutput
from engine.output_mailbox import Mailbox


def output(request_id, token_id, **fields):
    return TokenOutput(request_id=request_id, new_token_ids=[token_id], **fields)


async def waiting(mailbox: Mailbox) -> "asyncio.Task[list[TokenOutput]]":
    """A reader for whom there is nothing yet."""
    reader = asyncio.ensure_future(mailbox.take())
    assert not await has_woken(reader)
    return reader


async def has_woken(reader: "asyncio.Task[list[TokenOutput]]") -> bool:
    for _ in range(3):
        await asyncio.sleep(0)
    return reader.done()


async def test_what_waits_is_merged():
    mailbox = Mailbox()
    mailbox.put(output("r", 1, logprobs=[TokenLogprobs(1, -0.1, [])]))
    mailbox.put(output("r", 2, logprobs=[TokenLogprobs(2, -0.2, [])]))
    mailbox.put(TokenOutput(request_id="r", finish_reason="length", num_cached_tokens=16))
    mailbox.die(EngineDead("gone", retry_after=7))
    [merged] = await mailbox.take()
    assert (merged.new_token_ids, merged.finish_reason, merged.num_cached_tokens) == ([1, 2], "length", 16)
    assert [entry.token_id for entry in merged.logprobs] == [1, 2]
    with pytest.raises(EngineDead, match="gone") as caught:
        await mailbox.take()
    assert caught.value.retry_after == 7


async def test_what_has_ended_does_not_end_again():
    mailbox = Mailbox()
    mailbox.put(output("r", 1, finish_reason="length"))
    mailbox.put(TokenOutput(request_id="r", finish_reason="timeout"))
    assert [(each.new_token_ids, each.finish_reason) for each in await mailbox.take()] == [([1], "length")]


async def test_what_the_first_output_says_of_the_prompt_stays():
    mailbox = Mailbox()
    entries = [TokenLogprobs(7, -0.5, [])]
    mailbox.put(output("r", 1, prompt_logprobs=entries, embedding=[0.5]))
    mailbox.put(output("r", 2))
    mailbox.put(output("r", 3, finish_reason="length"))
    [merged] = await mailbox.take()
    assert (merged.new_token_ids, merged.finish_reason) == ([1, 2, 3], "length")
    assert (merged.prompt_logprobs, merged.embedding) == (entries, [0.5])


async def test_a_reader_is_woken_for_first_outputs_whole_intervals_and_ends():
    mailbox = Mailbox(interval=3)
    mailbox.put(output("r", 0))
    assert [one.new_token_ids for one in await mailbox.take()] == [[0]]
    reader = await waiting(mailbox)
    mailbox.put(output("r", 1))
    mailbox.put(output("r", 2))
    assert not await has_woken(reader)
    mailbox.put(output("r", 3))
    assert await has_woken(reader)
    assert [one.new_token_ids for one in reader.result()] == [[1, 2, 3]]
    reader = await waiting(mailbox)
    mailbox.put(output("r", 4))
    assert not await has_woken(reader)
    mailbox.put(TokenOutput(request_id="r", finish_reason="length"))
    assert await has_woken(reader)
    assert [one.new_token_ids for one in reader.result()] == [[4]]


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_is_lost_and_the_order_is_kept(seed):
    draw = random.Random(seed)
    mailbox, sent, received = Mailbox(), {}, {}

    async def core():
        for token_id in range(500):
            request_id = draw.choice("abc")
            sent.setdefault(request_id, []).append(token_id)
            mailbox.put(output(request_id, token_id))
            if draw.random() < 0.3:
                await asyncio.sleep(0)
        mailbox.die(EngineDead("all sent"))

    async def reader():
        while True:
            outputs = await mailbox.take()
            assert len({each.request_id for each in outputs}) == len(outputs) > 0
            for each in outputs:
                received.setdefault(each.request_id, []).extend(each.new_token_ids)
            for _ in range(draw.randrange(4)):
                await asyncio.sleep(0)

    with pytest.raises(EngineDead, match="all sent"):
        await asyncio.gather(core(), reader())
    assert received == sent


async def test_a_reader_waits_and_is_woken_once_per_step():
    mailbox = Mailbox()
    reader = await waiting(mailbox)
    mailbox.put(output("a", 1))
    mailbox.put(output("b", 2))
    assert [each.request_id for each in await reader] == ["a", "b"]
    reader = await waiting(mailbox)
    reader.cancel()


async def test_a_reader_that_was_cancelled_does_not_stop_the_core():
    mailbox = Mailbox()
    (await waiting(mailbox)).cancel()
    mailbox.put(output("r", 1))
    mailbox.die(EngineDead("gone", retry_after=7))
    assert [each.new_token_ids for each in await mailbox.take()] == [[1]]


async def test_a_slow_reader_costs_its_token_ids_only():
    mailbox = Mailbox()
    mailbox.put(output("r", 0))
    tracemalloc.start()
    try:
        for number in range(20_000):
            mailbox.put(output("r", number % 256))
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 16 * 20_000  # one reference of 8 bytes each, and room to grow
    [merged] = await mailbox.take()
    assert len(merged.new_token_ids) == 20_001
