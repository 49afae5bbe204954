"""Measures the cost of thousands of idle connections.

They are opened to a server of the tiny model. It reports the time of a short completion without and with
them, and the memory of a connection. It also reports when the server has closed all of them, since they sent
no request.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import Request, urlopen

import uvloop

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser
from server_processes import child_pid
from streams import Server

from loong.runs.spawned_server import ServerConfig, spawn_server
from loong.server.api.listen import allow_many_connections

NUM_ASKED = 300
NUM_AT_ONCE = 500  # connections that are being opened
MAX_WAIT = 120.0  # seconds, for connections to be closed


class Idle(asyncio.Protocol):
    """A connection that sends nothing, and records when it is closed."""

    closed_at: float | None = None

    def connection_lost(self, _error: Exception | None) -> None:  # noqa: D102
        self.closed_at = time.monotonic()


async def opened(server: Server, number: int) -> list[Idle]:
    loop = asyncio.get_running_loop()
    idle: list[Idle] = []
    while len(idle) < number:
        few = min(NUM_AT_ONCE, number - len(idle))
        made = await asyncio.gather(*(loop.create_connection(Idle, *server.address) for _ in range(few)))
        idle += (protocol for _, protocol in made)
    return idle


def completion_seconds(server: Server) -> dict[str, float]:
    """Return the seconds of short completions, one after the other, each on a connection of its own."""
    body = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
    request = Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
    seconds = []
    for _ in range(NUM_ASKED):
        begin = time.monotonic()
        with urlopen(request, timeout=60) as answer:
            answer.read()
        seconds.append(time.monotonic() - begin)
    seconds.sort()
    return {"median": seconds[NUM_ASKED // 2], "p99": seconds[NUM_ASKED * 99 // 100]}


async def seconds_to_close(idle: Sequence[Idle]) -> tuple[float, float]:
    """Return when the server has closed the first and the last of them, from now on."""
    begin = time.monotonic()
    while any(one.closed_at is None for one in idle):
        if time.monotonic() > begin + MAX_WAIT:
            left = sum(one.closed_at is None for one in idle)
            raise SystemExit(f"{left} connections that say nothing are open {MAX_WAIT:g} s later")
        await asyncio.sleep(0.1)
    times = [one.closed_at - begin for one in idle if one.closed_at is not None]
    return min(times), max(times)


async def measure(server: Server, number: int) -> dict[str, object]:
    alone = await asyncio.to_thread(completion_seconds, server)
    before = await asyncio.to_thread(server.sample)
    begin = time.monotonic()
    idle = await opened(server, number)
    open_seconds = time.monotonic() - begin
    among_idle = await asyncio.to_thread(completion_seconds, server)
    among = await asyncio.to_thread(server.sample)
    if early := sum(one.closed_at is not None for one in idle):
        raise SystemExit(f"{early} of {number} connections were closed at once")
    first, last = await seconds_to_close(idle)
    after = await asyncio.to_thread(server.sample)
    kib = 1024 * (among.api_memory_mib - before.api_memory_mib) / number
    print(f"{number:,} connections, {among.num_descriptors:,} descriptors, opened in {open_seconds:.1f} s")
    for name, seconds in (("alone", alone), ("among them", among_idle)):
        print(
            f"a completion {name}: median {1e3 * seconds['median']:.1f} ms, P99 {1e3 * seconds['p99']:.1f} ms"
        )
    print(f"{kib:.1f} KiB a connection; all were closed within {last:.0f} s")
    return {
        "num_connections": number,
        "num_descriptors": [before.num_descriptors, among.num_descriptors, after.num_descriptors],
        "open_seconds": open_seconds,
        "completion_seconds": {"alone": alone, "among": among_idle},
        "kib_per_connection": kib,
        "api_memory_mib": [before.api_memory_mib, among.api_memory_mib, after.api_memory_mib],
        "closed_after_seconds": [first, last],
    }


def main() -> None:
    parser = script_parser("idle_connections", __doc__)
    parser.add_argument(
        "--connections", type=int, default=10_000, help="number of idle connections (%(default)s)"
    )
    args = parser.parse_args()
    allow_many_connections()
    with TemporaryDirectory() as folder:
        config = ServerConfig(None, 2, 1, (), start_timeout=120.0)
        with spawn_server(config, "esp", Path(folder) / "server.log") as url:
            found = uvloop.run(measure(Server(url, child_pid()), args.connections))
    print_result("idle_connections", found, save=args.save)


if __name__ == "__main__":
    main()
