"""Measures how many streams `loong bench` can read on one core before it distorts the measurement.

The server is minimal: a process on another core that answers at once and then sends each stream a token a
tick, so its delays are known. `requests`: short streams of 16 tokens at rising rates. `tokens`: more and more
long streams at once. It reports how late requests were sent, and the error of the measured time between
tokens. Ceiling: 2,000 requests a second, sent with a P99 lateness below 10 ms.
"""

import asyncio
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import cast

import uvloop

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.workloads.client.client import Target, run_load
from loong.workloads.metrics.metrics import distribution_of
from loong.workloads.report.report import table
from loong.workloads.request import RequestShape, TokenRun, WorkloadRequest

TICK = 0.01  # seconds between two tokens of a stream
SHORT_TOKENS, LONG_TOKENS = 16, 300
PROMPT_TOKENS = 16
MAX_LATENESS = 0.01
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"id":"c","created":1,"choices":[{"index":0,"text":" a","finish_reason":null}]}\n\n'
END = b"data: [DONE]\n\n"
HEADER = ("load", "done/s", "tokens/s", "lateness P50", "P99", "tick off by P50", "P99", "CPU", "failed")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Streams(asyncio.Protocol):
    """One connection of the server; `following` are the streams that get tokens."""

    following: set["Streams"] = set()  # noqa: RUF012  all connections share it
    num_tokens = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its class
        self.received, self.num_left = b"", 0

    def data_received(self, data: bytes) -> None:
        """Begin a stream once its request is whole."""
        self.received += data
        head, separator, rest = self.received.partition(b"\r\n\r\n")
        if separator and len(rest) >= int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            self.received, self.num_left = b"", self.num_tokens
            self.transport.write(HEAD)
            self.following.add(self)

    def connection_lost(self, _exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.following.discard(self)

    def tick(self) -> None:
        """Send a token."""
        self.num_left -= 1
        if self.num_left:
            self.transport.write(chunk(TOKEN))
        else:
            self.transport.write(chunk(TOKEN) + chunk(END) + b"0\r\n\r\n")
            self.following.discard(self)


async def serve(num_tokens: int, ports: "SimpleQueue[int]") -> None:
    Streams.num_tokens = num_tokens
    server = await asyncio.get_running_loop().create_server(Streams, "127.0.0.1", 0, backlog=8192)
    ports.put(server.sockets[0].getsockname()[1])
    due = time.perf_counter()
    while True:
        due += TICK
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        for stream in tuple(Streams.following):
            stream.tick()


def run_server(num_tokens: int, core: int, ports: "SimpleQueue[int]") -> None:
    os.sched_setaffinity(0, {core})
    uvloop.run(serve(num_tokens, ports))


def measure(name: str, requests: Sequence[WorkloadRequest], core: int) -> tuple[dict[str, float], list[str]]:
    """Send requests to a server of their own; return the numbers, in seconds, and a row of the table."""
    spawning = multiprocessing.get_context("spawn")
    ports: SimpleQueue[int] = spawning.SimpleQueue()
    server = spawning.Process(
        target=run_server, args=(requests[0].num_output_tokens, core, ports), daemon=True
    )
    server.start()
    target = Target(f"http://127.0.0.1:{ports.get()}", "none", vocab_size=256)
    cpu_before = time.process_time()
    records = asyncio.run(run_load(target, requests))
    cpu = time.process_time() - cpu_before
    server.terminate()
    server.join()
    completed = [record for record in records if record.is_completed]
    duration = max(record.finish_time for record in records)
    lateness = distribution_of(record.lateness for record in records)
    off = distribution_of(abs((record.tpot or TICK) - TICK) for record in completed)
    assert lateness is not None
    if off is None:
        raise SystemExit(f"no request completed: {records[0].error}")
    numbers = {
        "per_second": len(completed) / duration,
        "tokens_per_second": sum(len(record.token_times) for record in completed) / duration,
        "p50_lateness": lateness["median"],
        "p99_lateness": lateness["p99"],
        "p50_tick_error": off["median"],
        "p99_tick_error": off["p99"],
        "cpu": cpu / duration,
        "failed": len(records) - len(completed),
    }
    times = (numbers[k] for k in ("p50_lateness", "p99_lateness", "p50_tick_error", "p99_tick_error"))
    return numbers, [
        name,
        f"{numbers['per_second']:,.0f}",
        f"{numbers['tokens_per_second']:,.0f}",
        *(f"{1e3 * seconds:.2f} ms" for seconds in times),
        f"{numbers['cpu']:.0%}",
        f"{numbers['failed']:.0f}",
    ]


def paced(rate: float, duration: float) -> list[WorkloadRequest]:
    """Return short streams at a constant rate."""
    number = max(1, int(rate * duration))
    return [_request(index, index / rate, SHORT_TOKENS) for index in range(number)]


def at_once(number: int) -> list[WorkloadRequest]:
    """Return long streams that begin within a second."""
    return [_request(index, index / number, LONG_TOKENS) for index in range(number)]


def _request(seed: int, time_due: float, num_tokens: int) -> WorkloadRequest:
    return WorkloadRequest(time_due, RequestShape((TokenRun(seed, PROMPT_TOKENS),), num_tokens))


def main() -> None:
    parser = script_parser("load_generator", __doc__)
    parser.add_argument(
        "--rates",
        type=float,
        nargs="*",
        default=[500, 1000, 2000, 3000, 4000],
        help="requests per second of `requests` (%(default)s)",
    )
    parser.add_argument(
        "--streams",
        type=int,
        nargs="*",
        default=[200, 500, 1000, 2000],
        help="numbers of streams of `tokens` (%(default)s)",
    )
    parser.add_argument(
        "--duration", type=float, default=5.0, help="duration at each rate, in seconds (%(default)s)"
    )
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    found: dict[str, dict[str, float]] = {}
    rows = []
    loads = [(f"{rate:,.0f} requests/s", paced(rate, args.duration)) for rate in args.rates]
    loads += [(f"{number:,} streams", at_once(number)) for number in args.streams]
    for name, requests in loads:
        found[name], row = measure(name, requests, cores[-1])
        rows.append(row)
        print(f"{name}: P99 lateness {1e3 * found[name]['p99_lateness']:.2f} ms", flush=True)
    os.sched_setaffinity(0, cores)
    print()
    print(table(HEADER, rows))
    on_time = [row["per_second"] for row in found.values() if row["p99_lateness"] < MAX_LATENESS]
    numbers = {"tick": TICK, "most_on_time": max(on_time, default=0.0), "loads": found}
    print_result("load_generator", numbers, save=args.save)


if __name__ == "__main__":
    main()
