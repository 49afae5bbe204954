"""Items reach the reader of their stream, whenever it reads."""

import asyncio
from contextlib import suppress

from loong.messages.stream import Stream


async def test_items_are_read_in_their_order() -> None:
    stream = Stream[int]()
    for item in range(6):
        stream.put(item)
    assert [await stream.get() for _ in range(6)] == [*range(6)]


async def test_all_that_is_there_is_read_together() -> None:
    stream = Stream[int]()
    for item in range(3):
        asyncio.get_running_loop().call_soon(stream.put, item)
    assert await stream.get_all() == [0, 1, 2]
    stream.put(3)
    assert await stream.get_all() == [3]


async def test_a_waiting_reader_gets_what_comes_one_by_one_or_together() -> None:
    stream = Stream[int | None]()
    read: list[int] = []

    async def reader() -> None:
        while (item := await stream.get()) is not None:
            read.append(item)

    reading = asyncio.create_task(reader())
    for count in (1, 3, 1):
        await asyncio.sleep(0)  # the reader waits
        for item in range(len(read), len(read) + count):
            stream.put(item)
        await asyncio.sleep(0)  # it reads
    stream.put(None)
    await reading
    assert read == [*range(5)]


async def test_a_reader_that_is_cancelled_leaves_the_stream_as_it_was() -> None:
    stream = Stream[int]()
    for item in range(2):
        reading = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        reading.cancel()
        stream.put(item)
        with suppress(asyncio.CancelledError):
            await reading
        assert await stream.get() == item
