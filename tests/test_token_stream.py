"""Tokens reach the reader of their stream, whenever it reads."""

import asyncio
from contextlib import suppress

from loong.core.events import ProducedToken
from loong.token_stream import TokenStream

TOKENS = tuple(ProducedToken("r", token_id) for token_id in range(5))


async def test_tokens_are_read_in_their_order_and_then_that_there_are_no_more() -> None:
    stream = TokenStream()
    for token in TOKENS:
        stream.put(token)
    stream.put(None)
    assert [await stream.get() for _ in range(6)] == [*TOKENS, None]


async def test_a_waiting_reader_gets_what_comes_one_by_one_or_together() -> None:
    stream = TokenStream()
    read: list[ProducedToken | None] = []

    async def reader() -> None:
        while (token := await stream.get()) is not None:
            read.append(token)

    reading = asyncio.create_task(reader())
    for count in (1, 3, 1):
        await asyncio.sleep(0)  # the reader waits
        for token in TOKENS[len(read) : len(read) + count]:
            stream.put(token)
        await asyncio.sleep(0)  # it reads
    stream.put(None)
    await reading
    assert read == [*TOKENS]


async def test_a_reader_that_is_cancelled_leaves_the_stream_as_it_was() -> None:
    stream = TokenStream()
    for token in TOKENS[:2]:
        reading = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        reading.cancel()
        stream.put(token)
        with suppress(asyncio.CancelledError):
            await reading
        assert await stream.get() == token
