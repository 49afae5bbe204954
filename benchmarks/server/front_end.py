"""Measures the cost of the HTTP front end, with an engine that costs nothing.

A server of the real application, on a core of its own, gets requests from another core. `together`: the
engine is in the server's process. `apart`: it is in another, on the generator's core, as with
--api-server-count. `short`: requests of 8 tokens that the engine gives at once, 64 connections that ask again
and again. `tokens`: 500 streams, of which each gets a token at every tick, and ticks as fast as the server
takes them. Then follow the same at half of the wanted rate, and the delay of the last byte of an answer, or
of each token. Either all streams get theirs at once or, `by turns`, eight groups one after the other. The
delay of the generator's own timer is reported too. `floor` is the rate at which a bare loop writes events,
which no server on it can exceed. Rates are for a second of the clock. As others may use the cores, they are
also for a second of processor time of the process that answers.
"""

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import socket
from statistics import median
from tempfile import TemporaryDirectory
from typing import cast

import uvloop

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.core.cluster_history import ClusterHistory
from loong.core.events import ProducedToken
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.request import FinishReason, NewRequest, RequestId
from loong.core.snapshot import Snapshot
from loong.engine.client import EngineLimits, PutToken
from loong.engine.cluster_size import ClusterSize, size_of
from loong.engine.health import Health
from loong.launcher.serve.api_process import ApiProcessConfig
from loong.launcher.serve.api_processes import Shown, api_processes
from loong.model.tiny import CONFIG, tiny_model
from loong.server.api.listen import bound_socket, serve
from loong.server.app import create_app
from loong.server.cluster_app import cluster_of, create_cluster_app
from loong.server.local_engine import LocalEngineClient
from loong.server.remote.forwarding import RemoteCluster
from loong.server.settings import ServerSettings
from loong.server.text.tokenizer import Tokenizer

NUM_CONNECTIONS = 64
NUM_STREAMS = 500
SHORT_TOKENS = 8
WANTED_REQUESTS, WANTED_TOKENS = 2000, 50_000  # a second
START_SECONDS = 8.0  # for the server to start and all streams to open, before the first tick
LETTERS = 64  # turn k sends the k-th letter, so that a client knows the turn of a token
EARLY_SECONDS = 1e-3  # that a loop may wake up before its time
NUM_GROUPS = 8  # where streams do not all get their tokens at once
FIRST_LETTER = 48
SETTINGS = ServerSettings("tiny")


@dataclass(frozen=True)
class Part:
    """The server's task: tokens on request, or a number of ticks, bound to the clock or not."""

    num_ticks: int = 0
    interval: float = 0.0
    is_apart: bool = False
    num_groups: int = 1  # of streams, which have their ticks by turns

    @property
    def turn(self) -> float:
        """Return the seconds between the ticks of two groups."""
        return self.interval / self.num_groups


class ReadyEngine:
    """An `Engine` that has every token before it is asked, or one for every stream at each tick."""

    limits = EngineLimits(2**20, 2**20, 264)
    num_stray_frames = 0
    prefix_counts = None
    largest_prefixes = ()

    def __init__(self, part: Part, origin: float) -> None:
        self._part, self._origin = part, origin
        self._streams: dict[RequestId, PutToken] = {}

    def submit(self, request: NewRequest, put: PutToken) -> None:
        """Put tokens that say which turn they belong to."""
        max_tokens = request.sampling_params.max_tokens
        if self._part.num_ticks == 0 or max_tokens <= SHORT_TOKENS:
            for number in range(1, max_tokens + 1):
                reason = FinishReason.LENGTH if number == max_tokens else None
                put(ProducedToken(request.request_id, FIRST_LETTER + number, reason))
            return
        self._streams[request.request_id] = put
        if len(self._streams) == NUM_STREAMS:
            self._ticking = asyncio.create_task(self._tick())

    def abort(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        """Do nothing, as no client leaves."""

    async def _tick(self) -> None:
        """Tick a group every turn of the machine's clock from the origin on; late ticks catch up."""
        streams, num_groups = list(self._streams.items()), self._part.num_groups
        for turn in range(self._part.num_ticks * num_groups):
            await asyncio.sleep(max(0.0, self._origin + turn * self._part.turn - time.monotonic()))
            is_last = turn // num_groups == self._part.num_ticks - 1
            for request_id, put in streams[turn % num_groups :: num_groups]:
                reason = FinishReason.LENGTH if is_last else None
                put(ProducedToken(request_id, FIRST_LETTER + turn % LETTERS, reason))

    def health(self) -> Health:
        """Return that the engine is well."""
        return Health()

    def snapshot(self) -> Snapshot:
        """Return a snapshot of an idle instance."""
        return Snapshot(0.0, (ElasticInstance(0, 1, InstanceKind.FULL, 4096),))

    def size(self) -> ClusterSize:
        """Return one instance."""
        return size_of(self.snapshot(), frozenset((0,)), 0, 1, 1)

    def scale(self, num_instances: int, num_memory: int | None = None) -> None:
        """Do nothing."""

    async def wait_for_size(self) -> None:
        """Return at once."""

    def reset_prefix_cache(self) -> None:
        """There is no cache."""

    def history(self) -> ClusterHistory:
        """Return an empty history."""
        return ClusterHistory()


@asynccontextmanager
async def together(engine: ReadyEngine, tokenizer: Tokenizer, listener: socket) -> AsyncIterator[None]:
    """Serve with the engine and the API in this process."""
    runner = await serve(create_app(engine, tokenizer, SETTINGS), listener)
    yield
    await runner.cleanup()


@asynccontextmanager
async def apart(engine: ReadyEngine, tokenizer: Tokenizer, listener: socket) -> AsyncIterator[None]:
    """Serve with the engine in this process, on the generator's core, and the API in another process."""
    folder = str(tokenizer.folder)

    def config(socket_path: str) -> ApiProcessConfig:
        remote_cluster = RemoteCluster(socket_path, has_dashboard=False, has_spans=False)
        return ApiProcessConfig(SETTINGS, engine.limits, folder, CONFIG.eos_token_ids, remote_cluster, "text")

    cluster = cluster_of(engine, SETTINGS)
    client = LocalEngineClient(engine, cluster.admission)
    shown = Shown(create_cluster_app(cluster), cluster.registry, cluster.admission)
    async with api_processes(config, 1, client, shown, listener, lambda _error: None):
        os.sched_setaffinity(0, {1})
        yield


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def api_pid() -> int:
    """Return the process that answers: the only child that a fork server has forked, or this one."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    named = {Path(f"/proc/{child}/comm").read_text().strip(): int(child) for child in children}
    return named.get("loong-api", os.getpid())


async def be_server(part: Part, origin: float) -> None:
    """Serve until standard input ends; prints the port, and then seconds of processor time.

    The seconds are those of the process that answers, and of the engine's, which may be the same.
    """
    os.sched_setaffinity(0, {0})
    with TemporaryDirectory() as folder, bound_socket("127.0.0.1", 0) as listener:
        tokenizer = Tokenizer.from_folder(tiny_model(Path(folder)), CONFIG.eos_token_ids)
        engine = ReadyEngine(part, origin)
        async with (apart if part.is_apart else together)(engine, tokenizer, listener):
            gc.freeze()  # as a server does
            pids = api_pid(), os.getpid()
            at_start = [processor_seconds(pid) for pid in pids]
            print(listener.getsockname()[1], flush=True)
            reader = asyncio.StreamReader()
            await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
            )
            await reader.read()
            print(*(processor_seconds(pid) - was for pid, was in zip(pids, at_start, strict=True)))


class Client(asyncio.Protocol):
    """One connection; passes received data to `on_data`."""

    def __init__(self, on_data: Callable[["Client", bytes], None]) -> None:
        self._on_data = on_data
        self.sent_at = 0.0
        self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's are not, by name

    def data_received(self, data: bytes) -> None:
        """Pass the data on."""
        self._on_data(self, data)

    def send(self, request: bytes) -> None:
        """Send a request, and note the time."""
        self.sent_at = time.monotonic()
        self.transport.write(request)


def request_of(max_tokens: int) -> bytes:
    fields = {"model": "tiny", "prompt": "say something", "max_tokens": max_tokens, "stream": True}
    body = json.dumps(fields | {"ignore_eos": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join((*head, "", "")).encode() + body


@dataclass
class Answers:
    """The answers to short requests; an answer is over with the last chunk of its body."""

    latencies: list[float] = field(default_factory=list)
    idle: list[Client] = field(default_factory=list)
    is_closed_loop: bool = True
    request: bytes = field(default_factory=lambda: request_of(SHORT_TOKENS))

    def took(self, client: Client, data: bytes) -> None:
        """Look for the end of an answer."""
        client.tail = client.tail[-8:] + data
        if client.tail.endswith(b"\r\n0\r\n\r\n"):
            self.latencies.append(time.monotonic() - client.sent_at)
            client.tail = b""
            if self.is_closed_loop:
                client.send(self.request)
            else:
                self.idle.append(client)


async def connect(port: int, number: int, on_data: Callable[[Client, bytes], None]) -> list[Client]:
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(lambda: Client(on_data), "127.0.0.1", port) for _ in range(number)]
    return [client for _, client in made]


async def short_requests(port: int, seconds: float, rate: float | None) -> dict[str, object]:
    """Send as many requests as the server takes, or `rate` a second."""
    answers = Answers(is_closed_loop=rate is None)
    clients = await connect(port, NUM_CONNECTIONS if rate is None else 4 * NUM_CONNECTIONS, answers.took)
    begin = time.monotonic()
    if rate is None:
        for client in clients:
            client.send(answers.request)
        await asyncio.sleep(seconds)
    else:
        answers.idle += clients
        for number in range(int(seconds * rate)):
            due = begin + number / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            while not answers.idle:  # noqa: ASYNC110 - a poll
                await asyncio.sleep(0.001)
            client = answers.idle.pop()
            client.send(answers.request)
            client.sent_at = due  # a generator that is late must not hide it
        while len(answers.latencies) < int(seconds * rate):  # noqa: ASYNC110 - a poll
            await asyncio.sleep(0.01)
    answers.is_closed_loop = False
    number, elapsed = len(answers.latencies), time.monotonic() - begin
    while rate is None and len(answers.idle) < len(clients):  # noqa: ASYNC110 - a poll
        await asyncio.sleep(0.001)
    for client in clients:
        client.transport.close()
    return {"per_second": number / elapsed, "num": len(answers.latencies)} | summary_of(answers.latencies)


async def streamed_tokens(port: int, part: Part, origin: float) -> dict[str, object]:
    """Read streams that get a token a tick; report the delay of each, if ticks are bound to the clock."""
    latencies: list[float] = []
    num_tokens, is_over = 0, asyncio.Event()

    def took(_: Client, data: bytes) -> None:
        nonlocal num_tokens
        now = time.monotonic()
        texts = data.split(b'"text":"')[1:]
        num_tokens += len(texts)
        for text in texts:
            letter = text[0] - FIRST_LETTER
            if part.turn:
                turn = int((now - origin + EARLY_SECONDS) / part.turn)
                latencies.append(now - origin - (turn - (turn - letter) % LETTERS) * part.turn)
        if num_tokens >= part.num_ticks * NUM_STREAMS:
            is_over.set()

    clients = await connect(port, NUM_STREAMS, took)
    for client in clients:
        client.send(request_of(part.num_ticks))
    begin = max(origin, time.monotonic())
    await is_over.wait()
    elapsed = time.monotonic() - begin
    for client in clients:
        client.transport.close()
    return {"per_second": num_tokens / elapsed, "num": num_tokens} | summary_of(latencies)


def summary_of(latencies: list[float]) -> dict[str, object]:
    if not latencies:
        return {}
    latencies.sort()
    return {"median": median(latencies), "p99": latencies[int(0.99 * len(latencies))], "max": latencies[-1]}


def floor(num_streams: int, num_ticks: int) -> float:
    """Return the writes a second of an event to each of `num_streams` sockets in turn, by a bare loop."""

    async def write() -> float:
        event = b"d4\r\ndata: " + b"x" * 204 + b"\n\n\r\n"
        loop = asyncio.get_running_loop()
        transports: list[asyncio.Transport] = []

        class Sink(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                transports.append(cast("asyncio.Transport", transport))

        server = await loop.create_server(Sink, "127.0.0.1", 0)
        sink = subprocess.Popen(  # noqa: ASYNC220 - nobody waits meanwhile
            [sys.executable, __file__, "--be-sink", str(server.sockets[0].getsockname()[1]), str(num_streams)]
        )
        while len(transports) < num_streams:  # noqa: ASYNC110 - a poll
            await asyncio.sleep(0.01)
        used = time.process_time()
        for _ in range(num_ticks):
            for transport in transports:
                transport.write(event)
            await asyncio.sleep(0)
        used = time.process_time() - used
        sink.kill()
        sink.wait()
        server.close()
        return num_streams * num_ticks / used

    return uvloop.run(write())


async def be_sink(port: int, number: int) -> None:
    """Read all data and drop it."""
    os.sched_setaffinity(0, {1})
    await connect(port, number, lambda _client, _data: None)
    await asyncio.Event().wait()


async def lateness(found: list[float]) -> None:
    """Record how late this process wakes up, every 5 ms, until cancelled: its error in measurements."""
    while True:
        due = time.monotonic() + 0.005
        await asyncio.sleep(0.005)
        found.append(time.monotonic() - due)


def measured(
    part: Part, measure: Callable[[int, float], Coroutine[None, None, dict[str, object]]]
) -> dict[str, object]:
    """Return the results of `measure` on a server of its own, and the server's processor time."""

    async def watched(port: int) -> dict[str, object]:
        late: list[float] = []
        watching = asyncio.create_task(lateness(late))
        found = await measure(port, origin)
        watching.cancel()
        return found | {"generator_late_p99": sorted(late)[int(0.99 * len(late))]}

    origin = time.monotonic() + START_SECONDS
    numbers = (part.num_ticks, part.interval, part.is_apart, part.num_groups, origin)
    command = [sys.executable, __file__, "--be-server", *(str(float(number)) for number in numbers)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        found = uvloop.run(watched(int(server.stdout.readline())))
        server.stdin.close()
        api_seconds, engine_seconds = map(float, server.stdout.readline().split())
        server.stdin = None
    number = found.pop("num")
    assert isinstance(number, int)
    found["per_processor_second"] = number / api_seconds
    return found | ({"per_processor_second_of_engine": number / engine_seconds} if part.is_apart else {})


def all_parts(seconds: float, is_apart: bool) -> dict[str, dict[str, object]]:
    """Run every part with engine and API together, or apart."""
    tick = 2 * NUM_STREAMS / WANTED_TOKENS  # half of the rate wanted
    num_ticks = int(seconds / tick)
    ready, fast = Part(is_apart=is_apart), Part(2 * num_ticks, is_apart=is_apart)
    at_once = Part(num_ticks, tick, is_apart)
    by_turns = replace(at_once, num_groups=NUM_GROUPS)
    return {
        "short": measured(ready, lambda port, _: short_requests(port, seconds, None)),
        "short at half": measured(ready, lambda port, _: short_requests(port, seconds, WANTED_REQUESTS / 2)),
        "tokens": measured(fast, lambda port, origin: streamed_tokens(port, fast, origin)),
        "tokens at half": measured(at_once, lambda port, origin: streamed_tokens(port, at_once, origin)),
        "by turns": measured(by_turns, lambda port, origin: streamed_tokens(port, by_turns, origin)),
    }


def main() -> None:
    parser = script_parser("front_end", __doc__)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="duration of each part, in seconds (%(default)s)"
    )
    parser.add_argument(
        "--way",
        choices=("together", "apart"),
        nargs="*",
        default=["together", "apart"],
        help="process of the engine: with the API, or apart (%(default)s)",
    )
    parser.add_argument("--be-server", nargs=5, type=float, help=argparse.SUPPRESS)
    parser.add_argument("--be-sink", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.be_server is not None:
        num_ticks, interval, is_apart, num_groups, origin = args.be_server
        part = Part(int(num_ticks), interval, bool(is_apart), int(num_groups))
        return uvloop.run(be_server(part, origin))
    if args.be_sink is not None:
        return uvloop.run(be_sink(*args.be_sink))
    os.sched_setaffinity(0, {1})
    found: dict[str, dict[str, dict[str, object]]] = {}
    found["floor"] = {"floor": {"per_processor_second": floor(NUM_STREAMS, 200)}}
    for way in args.way:
        found[way] = all_parts(args.seconds, way == "apart")
    for way, parts in found.items():
        for name, numbers in parts.items():
            reported = ", ".join(f"{key} {value:,.4g}" for key, value in numbers.items())
            print(f"{way:>8} {name:>16}: {reported}")
    print_result("front_end", found, save=args.save)
    return None


if __name__ == "__main__":
    main()
