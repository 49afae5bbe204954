"""The choices of one HTTP request. Each of its prompts is one request to the engine."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from loong.core.errors import LoongError
from loong.core.request import NewRequest
from loong.messages.stream import Stream
from loong.server.context import Server
from loong.server.openai.generation import generate
from loong.server.openai.output import Delta, OutputOptions


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices of one prompt. `index` is the first one's, and `echo` is text before each."""

    index: int
    request: NewRequest
    echo: str = ""


def generate_choices(
    server: Server, choices: Sequence[Choices], options: OutputOptions, arrived_at: float
) -> AsyncGenerator[Delta, None]:
    """Yield the deltas of all choices of all prompts, in the order of their arrival.

    All choices are aborted when the generator is closed, when its task is cancelled, or when one fails.
    """
    streams = [generate(server, of.request, options, arrived_at, choice=of.index) for of in choices]
    return streams[0] if len(streams) == 1 else _merge(streams)


async def _merge(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    merged: Stream[Delta | LoongError | None] = Stream()
    tasks = [asyncio.create_task(_pump(stream, merged)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            item = await merged.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, LoongError):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        task.result()  # raises an unexpected error


async def _pump(stream: AsyncGenerator[Delta, None], merged: Stream[Delta | LoongError | None]) -> None:
    try:
        async with aclosing(stream):
            async for delta in stream:
                merged.put(delta)
    except LoongError as error:
        merged.put(error)
    finally:
        merged.put(None)
