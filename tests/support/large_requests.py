"""The time that an event loop is blocked, while large requests come."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from raw_http import request_head

_TEXT = "Grüße, said the héron to the 鷺; and so on, line after line.\n"
_MILLION_CHARACTERS = (_TEXT * (1_000_000 // len(_TEXT) + 1))[:1_000_000]

LARGE_REQUESTS: Mapping[str, tuple[str, dict[str, object]]] = {
    "a million token ids": ("/v1/completions", {"prompt": [77] * 1_000_000, "max_tokens": 1}),
    "a million token ids, echoed": (
        "/v1/completions",
        {"prompt": [[77] * 1_000_000], "max_tokens": 1, "return_token_ids": True},
    ),
    "a million characters": ("/v1/completions", {"prompt": _MILLION_CHARACTERS, "max_tokens": 1}),
    "a chat of 4,000 messages": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": _MILLION_CHARACTERS[:250]}] * 4000,
            "max_tokens": 1,
        },
    ),
    "a million characters to tokenize": (
        "/tokenize",
        {"prompt": _MILLION_CHARACTERS[:500_000], "return_token_strs": True},
    ),
    "sixteen choices with log probabilities": (
        "/v1/completions",
        {"prompt": [*range(250)], "n": 16, "max_tokens": 500, "logprobs": 20},
    ),
    "a million token ids to detokenize": ("/detokenize", {"tokens": [77] * 1_000_000}),
}


class Stalls:
    """The longest time between two turns of the loop so far and the most that it computed in one, in seconds.

    The second does not count what other threads and processes take. `computed` is what all threads of this
    process did, once the watch is over: a share of that can be bounded on any machine, however busy.
    """

    longest = 0.0
    longest_computing = 0.0
    computed = 0.0

    @property
    def largest_share(self) -> float:
        """Of all that was computed, the part that was computed in one turn of the loop."""
        return self.longest_computing / self.computed

    async def watch(self) -> None:
        """Until cancelled; a turn is due every millisecond."""
        while True:
            before, before_computing = time.monotonic(), time.thread_time()
            await asyncio.sleep(0.001)
            seconds = time.monotonic() - before - 0.001
            self.longest = max(self.longest, seconds)
            self.longest_computing = max(self.longest_computing, time.thread_time() - before_computing)


@asynccontextmanager
async def watched() -> AsyncIterator[Stalls]:
    """Yield the stalls that are found while the context lasts."""
    stalls, before = Stalls(), time.process_time()
    watching = asyncio.create_task(stalls.watch())
    try:
        yield stalls
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        stalls.computed = time.process_time() - before


def request_bytes(name: str) -> bytes:
    """Return one of the large requests, made beforehand: that takes long too."""
    path, fields = LARGE_REQUESTS[name]
    body = json.dumps(fields).encode()
    return request_head(path, "Connection: close", f"Content-Length: {len(body)}") + body


def send_and_wait(url: str, request: bytes) -> int:
    """Send a request, read the answer to its end, and return its status; for a thread."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(request)
        head = connection.recv(2**16)
        buffer = bytearray(2**20)
        while connection.recv_into(buffer):
            pass
    return int(head.split()[1])
