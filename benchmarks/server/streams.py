"""Checks that clients that leave do not harm those that stay.

A server of the tiny model has 1,000 streams open at a time. Of these, 50 clients are steady: they read every
answer to its end and ask again. First all others do so too. Then the others leave after a random time, in the
middle of their answers, and come back at once on new connections. It reports the tokens that steady clients
get a second in both parts, and the server's memory and descriptors over time. It also reports the size of its
decision log, of which it keeps the last 32 MiB. At the end all leave. Then no KV may be held, and no
connection be open.
"""

import asyncio
import json
import random
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import uvloop

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser
from server_processes import child_pid, kv_tokens, processes_of

from loong.runs.spawned_server import ServerConfig, spawn_server

NUM_STEADY = 50
MAX_TOKENS = 64
MEAN_STAY = 20.0  # seconds, of a client that leaves: about the time of an answer under this load
SAMPLE_SECONDS = 5.0
FREE_SECONDS = 20.0  # for all KV to be free at the end


def request() -> bytes:
    fields = {"prompt": [random.randrange(3, 250) for _ in range(16)], "max_tokens": MAX_TOKENS}
    body = json.dumps(fields | {"stream": True, "ignore_eos": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join((*head, "", "")).encode() + body


class StreamClient(asyncio.Protocol):
    """A connection that asks again and again; `num_tokens` have come."""

    num_tokens = 0
    num_failed = 0
    _tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self.transport = cast("asyncio.Transport", transport)  # uvloop's are not, by name
        self.transport.write(request())

    def leave(self) -> None:
        """Vanish: later data is answered with a reset."""
        if (sock := self.transport.get_extra_info("socket")) is None:
            return  # it was reset already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def data_received(self, data: bytes) -> None:  # noqa: D102
        self.num_tokens += data.count(b'"text":')
        self.num_failed += data.count(b'"error":')
        self._tail = self._tail[-8:] + data
        if self._tail.endswith(b"\r\n0\r\n\r\n"):
            self._tail = b""
            self.transport.write(request())


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of the server: of all its processes, and of the one that clients connect to."""

    memory_mib: float
    api_memory_mib: float
    num_descriptors: int
    kv_tokens: float
    decisions_mib: float


class Server:
    """The state of a server as visible from outside."""

    def __init__(self, url: str, pid: int, decision_log: Path | None = None) -> None:
        self.url, self._pid, self._decision_log = url, pid, decision_log
        host, port = url.removeprefix("http://").split(":")
        self.address = host, int(port)

    def sample(self) -> Sample:
        """Return a sample of now."""
        own, *others = processes_of(self._pid)
        log = self._decision_log
        decisions_mib = 0.0 if log is None else log.stat().st_size / 2**20
        all_mib = own.memory_mib + sum(other.memory_mib for other in others)
        return Sample(all_mib, own.memory_mib, own.num_descriptors, kv_tokens(self.url), decisions_mib)


async def connect(server: Server, number: int) -> list[StreamClient]:
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(StreamClient, *server.address))[1] for _ in range(number)]


async def leave_and_come_back(server: Server, until: float) -> int:
    """Return how often one client left."""
    num_left = 0
    while time.monotonic() < until:
        (client,) = await connect(server, 1)
        stay = random.expovariate(1 / MEAN_STAY)
        await asyncio.sleep(min(stay, max(0.0, until - time.monotonic())))
        client.leave()
        num_left += 1
    return num_left


async def sampled(server: Server, seconds: float) -> list[Sample]:
    samples = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await asyncio.sleep(SAMPLE_SECONDS)
        samples.append(await asyncio.to_thread(server.sample))
    return samples


async def rate_of(
    steady: Sequence[StreamClient], server: Server, seconds: float
) -> tuple[float, list[Sample]]:
    """Return the tokens a second of the steady clients, and samples of the server."""
    before, begin = sum(client.num_tokens for client in steady), time.monotonic()
    samples = await sampled(server, seconds)
    return (sum(client.num_tokens for client in steady) - before) / (time.monotonic() - begin), samples


async def measure(
    server: Server, num_streams: int, seconds: float, leave_seconds: float
) -> dict[str, object]:
    at_rest = await asyncio.to_thread(server.sample)
    most = at_rest.num_descriptors + 8  # epolls and pipes of threads that were not needed before
    steady = await connect(server, NUM_STEADY)
    staying = await connect(server, num_streams - NUM_STEADY)
    await asyncio.sleep(seconds / 4)
    stay_rate, stay_samples = await rate_of(steady, server, seconds)
    print(f"no client leaves: steady clients get {stay_rate:,.0f} tokens/s")
    for client in staying:
        client.leave()
    until = time.monotonic() + leave_seconds
    leaving = [
        asyncio.create_task(leave_and_come_back(server, until)) for _ in range(num_streams - NUM_STEADY)
    ]
    leave_rate, samples = await rate_of(steady, server, leave_seconds)
    num_left = sum(await asyncio.gather(*leaving))
    print(f"{num_left:,} times a client left: steady clients get {leave_rate:,.0f} tokens/s")
    for client in steady:
        client.leave()
    begin = time.monotonic()
    while (last := await asyncio.to_thread(server.sample)).kv_tokens or last.num_descriptors > most:
        if time.monotonic() > begin + FREE_SECONDS:
            raise SystemExit(f"{FREE_SECONDS:g} s after all left: {last}")
        await asyncio.sleep(0.1)
    first, third = samples[0], samples[len(samples) // 3]
    for name, sample in (
        ("at rest", at_rest),
        ("first", first),
        ("third", third),
        ("last", samples[-1]),
        ("end", last),
    ):
        print(f"{name:>8}: {sample}")
    return {
        "num_streams": num_streams,
        "leave_seconds": leave_seconds,
        "num_left": num_left,
        "num_failed": sum(client.num_failed for client in (*steady, *staying)),
        "steady_tokens_per_second": {"nobody leaves": stay_rate, "others leave": leave_rate},
        "seconds_to_free": time.monotonic() - begin,
        "memory_mib": [round(sample.memory_mib) for sample in (at_rest, *stay_samples, *samples, last)],
        "api_memory_mib": [
            round(sample.api_memory_mib) for sample in (at_rest, *stay_samples, *samples, last)
        ],
        "num_descriptors": [sample.num_descriptors for sample in (at_rest, *stay_samples, *samples, last)],
        "decisions_mib": [round(sample.decisions_mib) for sample in (at_rest, *stay_samples, *samples, last)],
    }


def main() -> None:
    parser = script_parser("streams", __doc__)
    parser.add_argument(
        "--streams", type=int, default=1000, help="number of streams open at a time (%(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="duration of the part in which no client leaves, in seconds (%(default)s)",
    )
    parser.add_argument(
        "--leave-seconds",
        type=float,
        default=300.0,
        help="duration of the part in which clients leave, in seconds (%(default)s)",
    )
    args = parser.parse_args()
    random.seed(0)
    with TemporaryDirectory() as folder:
        decisions = Path(folder) / "decisions.jsonl"
        config = ServerConfig(None, 2, 1, ("--decision-log", str(decisions)), start_timeout=120.0)
        log = Path(folder) / "server.log"
        with spawn_server(config, "esp", log) as url:
            server = Server(url, child_pid(), decisions)
            found = uvloop.run(measure(server, args.streams, args.seconds, args.leave_seconds))
    print_result("streams", found, save=args.save)


if __name__ == "__main__":
    main()
