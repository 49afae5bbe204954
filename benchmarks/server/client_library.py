"""Measures what the HTTP client of `loong bench` saves over a library's.

The client and aiohttp's read the same streams from the minimal server of `load_generator.py`: many short
ones, and some long ones. Processor time decides how many of them a core can follow.
"""

import asyncio
import multiprocessing
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import msgspec
from load_generator import at_once, paced, run_server

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.workloads.client.client import Target, run_load
from loong.workloads.client.sse import EventDecoder
from loong.workloads.report.report import table
from loong.workloads.request import WorkloadRequest

LONG, SHORT = at_once(100), paced(500, 4.0)
Read: TypeAlias = Callable[[str, Sequence[WorkloadRequest]], Coroutine[Any, Any, int]]


async def by_loong(url: str, requests: Sequence[WorkloadRequest]) -> int:
    """Return how many tokens the client of `loong bench` reads."""
    records = await run_load(Target(url, "none", vocab_size=256), requests)
    return sum(len(record.token_times) for record in records)


async def by_aiohttp(url: str, requests: Sequence[WorkloadRequest]) -> int:
    """Return how many tokens aiohttp's client reads, with the same decoder of events and no records."""

    async def follow(session: aiohttp.ClientSession, request: WorkloadRequest) -> int:
        await asyncio.sleep(request.arrival_time)
        num_tokens, events = 0, EventDecoder()
        async with session.post(f"{url}/v1/completions", json={"prompt": [1] * 16, "stream": True}) as answer:
            async for received in answer.content.iter_any():
                for event in events.feed(received):
                    num_tokens += event != "[DONE]" and bool(msgspec.json.decode(event))
        return num_tokens

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return sum(await asyncio.gather(*(follow(session, request) for request in requests)))


def token_time(read: Read, requests: Sequence[WorkloadRequest], core: int) -> float:
    """Return the processor seconds of a token, from a server of its own on `core`."""
    spawning = multiprocessing.get_context("spawn")
    ports = spawning.SimpleQueue()
    server = spawning.Process(
        target=run_server, args=(requests[0].num_output_tokens, core, ports), daemon=True
    )
    server.start()
    url, before = f"http://127.0.0.1:{ports.get()}", time.process_time()
    num_tokens = asyncio.run(read(url, requests))
    spent = time.process_time() - before
    server.terminate()
    server.join()
    return spent / num_tokens


READS = (by_loong, by_aiohttp)


def main() -> None:
    """Measure both, and print them."""
    parser = script_parser("client_library", __doc__)
    parser.add_argument("--server-core", type=int, default=1, help="core of the server (%(default)s)")
    args = parser.parse_args()
    core = args.server_core
    rows = {
        "us of a token, 100 long streams": [1e6 * token_time(read, LONG, core) for read in READS],
        "us of a token, 500 short streams/s": [1e6 * token_time(read, SHORT, core) for read in READS],
    }
    cells = [(name, *(f"{number:.1f}" for number in numbers)) for name, numbers in rows.items()]
    print(table(("", "loong", "library"), cells), end="\n\n")
    print_result("client_library", rows, save=args.save)


if __name__ == "__main__":
    main()
