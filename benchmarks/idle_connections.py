"""What do thousands of connections cost that say nothing?

They are opened to a server of the tiny model. It tells how long a short completion takes without and with
them, what memory a connection costs, and that none is left when they have gone.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from urllib.request import Request, urlopen

import uvloop
from result import print_result, script_parser
from streams import Server, child_pid

from loong.launcher.embedded import ServerConfig, embedded_server
from loong.server.listen import allow_many_connections

NUM_ASKED = 50
MAX_WAIT = 30.0  # seconds, for connections to be gone


async def opened(server: Server, number: int) -> list[asyncio.BaseTransport]:
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(asyncio.Protocol, *server.address))[0] for _ in range(number)]


def completion_seconds(server: Server) -> float:
    """The median of some short completions, one after the other, each on a connection of its own."""
    body = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
    seconds = []
    for _ in range(NUM_ASKED):
        begin = time.monotonic()
        with urlopen(Request(f"{server.url}/v1/completions", body), timeout=60) as answer:
            answer.read()
        seconds.append(time.monotonic() - begin)
    return median(seconds)


async def measure(server: Server, number: int) -> dict[str, object]:
    alone = await asyncio.to_thread(completion_seconds, server)
    before = await asyncio.to_thread(server.sample)
    begin = time.monotonic()
    transports: Sequence[asyncio.BaseTransport] = await opened(server, number)
    open_seconds = time.monotonic() - begin
    beside = await asyncio.to_thread(completion_seconds, server)
    among = await asyncio.to_thread(server.sample)
    for transport in transports:
        transport.close()
    begin = time.monotonic()
    while (after := await asyncio.to_thread(server.sample)).num_descriptors > before.num_descriptors + 8:
        if time.monotonic() > begin + MAX_WAIT:
            raise SystemExit(f"{after.num_descriptors} descriptors are open {MAX_WAIT:g} s later")
        await asyncio.sleep(0.1)
    kib = 1024 * (among.api_memory_mib - before.api_memory_mib) / number
    print(f"{number:,} connections, {among.num_descriptors:,} descriptors, opened in {open_seconds:.1f} s")
    print(f"a completion takes {1e3 * alone:.1f} ms alone, {1e3 * beside:.1f} ms among them")
    print(f"{kib:.1f} KiB a connection")
    return {
        "num_connections": number,
        "num_descriptors": [before.num_descriptors, among.num_descriptors, after.num_descriptors],
        "open_seconds": open_seconds,
        "completion_seconds": {"alone": alone, "among": beside},
        "kib_per_connection": kib,
    }


def main() -> None:
    parser = script_parser("idle_connections", __doc__)
    parser.add_argument("--connections", type=int, default=10_000, help="(%(default)s)")
    args = parser.parse_args()
    allow_many_connections()
    with TemporaryDirectory() as folder:
        config = ServerConfig(None, 2, 1, (), start_timeout=120.0)
        with embedded_server(config, "esp", Path(folder) / "server.log") as url:
            found = uvloop.run(measure(Server(url, child_pid()), args.connections))
    print_result("idle_connections", found, save=args.save)


if __name__ == "__main__":
    main()
