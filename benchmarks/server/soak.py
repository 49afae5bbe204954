"""Checks that a server that runs for long does not grow.

With each policy, a server of the tiny model on up to four CPU instances gets streams at random times. Most
are left after a number of tokens drawn at random, some are read to the end, some are refused. A few have
several choices, logprobs, or one of many schemas. Memory, descriptors and threads of all its processes are
sampled. At the end no KV may be held. "Growth" is the slope of memory over the last third of the streams.
"""

import argparse
import asyncio
import json
import random
import socket
import struct
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser
from server_processes import ProcessUse, child_pid, kv_tokens, processes_of

from loong.runs.spawned_server import ServerConfig, spawn_server
from loong.scheduler.policy import policy_kind

NUM_INSTANCES = 4
NUM_AT_ONCE = 64  # streams that are open at a time, at most
MAX_TOKENS = 64
NUM_SCHEMAS = 200
READ_SECONDS = 120.0  # within which a stream has its next token
FREE_SECONDS = 20.0  # for all KV to be free at the end
KINDS = ("server", "workers", "schemas")  # of processes: the server is the engine and its APIs
NUM_ROWS = 16  # of the table
PART_LEFT, PART_REFUSED = 0.7, 0.05  # the others are read to the end

Ask = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of the server: seconds, streams, MiB by kind of process, and totals of all processes."""

    seconds: float
    num_streams: int
    memory_mib: Mapping[str, float]
    num_descriptors: int
    num_threads: int

    @property
    def all_mib(self) -> float:
        """Return the memory of all processes."""
        return sum(self.memory_mib.values())


class Soak:
    """The requests to one server, and their outcomes."""

    def __init__(self, url: str, pid: int, max_words: int) -> None:
        self.url, self._pid, self._max_words = url, pid, max_words
        host, port = url.removeprefix("http://").split(":")
        self._address = host, int(port)
        self.outcomes: Counter[str] = Counter()
        self._begun_at = time.monotonic()

    @property
    def num_streams(self) -> int:
        """Return the number of streams that are over."""
        return self.outcomes.total()

    async def ask(self, num_streams: int, seconds: float) -> None:
        """Send streams, spread over that time, or over longer if the server is slower."""
        rate, open_streams = num_streams / seconds, asyncio.Semaphore(NUM_AT_ONCE)
        begin = due = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(num_streams):
                await open_streams.acquire()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(self._stream()).add_done_callback(lambda _: open_streams.release())
                due = max(due, begin) + random.expovariate(rate)

    async def sampled(self, seconds: float) -> list[Sample]:
        """Return samples that far apart, until cancelled."""
        samples: list[Sample] = []
        try:
            while True:
                samples.append(self.sample())
                await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            return samples

    def sample(self) -> Sample:
        """Return the server as it is now."""
        memory, num_descriptors, num_threads = defaultdict[str, float](float), 0, 0
        for use in processes_of(self._pid):
            memory[_kind(use)] += use.memory_mib
            num_descriptors += use.num_descriptors
            num_threads += use.num_threads
        seconds = time.monotonic() - self._begun_at
        return Sample(seconds, self.num_streams, memory, num_descriptors, num_threads)

    async def _stream(self) -> None:
        is_refused, is_left = random.random() < PART_REFUSED, random.random() < PART_LEFT
        path, ask = _refused() if is_refused else _served(self._max_words)
        num_read = random.randint(1, ask["max_tokens"] - 1) if is_left else None
        body = json.dumps(ask).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._address[0]}\r\nContent-Type: application/json\r\n"
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            outcome = await self._read(reader, num_read)
            if outcome == "left" and random.random() < 0.5:  # vanish: what comes now is answered with a reset
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except (OSError, TimeoutError) as error:
            outcome = type(error).__name__
        finally:
            writer.close()
        self.outcomes[outcome] += 1

    async def _read(self, reader: asyncio.StreamReader, num_tokens: int | None) -> str:
        """Read a number of events of a stream (None: all), and return its outcome."""
        status = (await asyncio.wait_for(reader.readline(), READ_SECONDS)).split()[1].decode()
        num_read, is_done = 0, False
        while line := await asyncio.wait_for(reader.readline(), READ_SECONDS):
            if line.startswith(b'data: {"error"'):
                return "failed"
            is_done |= line.startswith(b"data: [DONE]")
            num_read += line.startswith(b"data: {")
            if num_tokens is not None and num_read > num_tokens:
                return "left"
        return "finished" if is_done else status


def _served(max_words: int) -> tuple[str, Ask]:
    """Return a request that is answered: of completions or a chat, and of any kind."""
    kind = random.random()
    ask: dict[str, Any] = {"max_tokens": random.randint(4, MAX_TOKENS), "stream": True, "ignore_eos": True}
    if kind < 0.05:
        ask["n"] = random.randint(2, 4)
    elif kind < 0.1:
        ask |= {"response_format": _schema(), "ignore_eos": False}
    has_logprobs = 0.1 <= kind < 0.15
    words = " ".join(str(random.getrandbits(16)) for _ in range(random.randint(1, max_words)))
    if "response_format" in ask or random.random() < 0.5:
        chat = {"messages": [{"role": "user", "content": words}], "logprobs": has_logprobs}
        return "/v1/chat/completions", {**ask, **chat}
    return "/v1/completions", {**ask, "prompt": words} | ({"logprobs": 3} if has_logprobs else {})


def _refused() -> tuple[str, Ask]:
    """Return a request that is refused: for an unknown field, a value out of bounds, or a prompt too long."""
    ask: dict[str, Any] = {"prompt": "hello", "max_tokens": 8, "stream": True}
    wrong = random.choice(
        ({f"no_{random.getrandbits(32)}": 1}, {"temperature": -1}, {"prompt": [5] * 2**17}, {"model": "none"})
    )
    return "/v1/completions", {**ask, **wrong}


def _schema() -> Ask:
    """Return one of many schemas."""
    names = [f"field_{random.randrange(NUM_SCHEMAS)}"]
    properties = {name: {"enum": ["yes", "no"]} for name in names}
    schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _kind(use: ProcessUse) -> str:
    if "check_process" in use.command:
        return "schemas"
    return "workers" if use.name.startswith("loong-worker") else "server"


async def soak(soak: Soak, num_streams: int, seconds: float, sample_seconds: float) -> list[Sample]:
    sampling = asyncio.create_task(soak.sampled(sample_seconds))
    await asyncio.sleep(0)
    try:
        await soak.ask(num_streams, seconds)
    finally:
        sampling.cancel()
    samples = await sampling
    begin = time.monotonic()
    while num_held := await asyncio.to_thread(kv_tokens, soak.url):
        if time.monotonic() > begin + FREE_SECONDS:
            raise SystemExit(f"{num_held:g} tokens of KV are held {FREE_SECONDS:g} s after all have left")
        await asyncio.sleep(0.1)
    return [*samples, soak.sample()]


def growth_kib(samples: Sequence[Sample]) -> float:
    """Return KiB a stream, of all processes over the last third of the streams."""
    last = [sample for sample in samples if sample.num_streams >= samples[-1].num_streams * 2 / 3]
    slope, _ = linear_regression([one.num_streams for one in last], [one.all_mib for one in last])
    return 1024 * slope


def print_table(samples: Sequence[Sample]) -> None:
    print("minutes  streams   server  workers  schemas  all MiB  descriptors  threads")
    for sample in (*samples[: -1 : max(1, len(samples) // NUM_ROWS)], samples[-1]):
        memory = [sample.memory_mib.get(kind, 0.0) for kind in KINDS]
        print(f"{sample.seconds / 60:>7.1f}{sample.num_streams:>9,}", end="")
        print("".join(f"{mib:>9,.0f}" for mib in (*memory, sample.all_mib)), end="")
        print(f"{sample.num_descriptors:>13}{sample.num_threads:>9}")


def main() -> None:
    parser = script_parser("soak", __doc__)
    parser.add_argument(
        "--policy", default="esp", help="one policy or several, separated by commas (%(default)s)"
    )
    parser.add_argument("--streams", type=int, default=20_000, help="total number of streams (%(default)s)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        help="time over which the streams arrive, in minutes (%(default)s)",
    )
    parser.add_argument(
        "--prompt-words",
        type=int,
        default=40,
        help="words of a prompt, of up to 6 tokens each, at most (%(default)s)",
    )
    parser.add_argument(
        "--sample-seconds", type=float, default=10.0, help="seconds between two samples (%(default)s)"
    )
    parser.add_argument("--extra-server-args", default="", help="more flags for `loong serve`, as one word")
    args = parser.parse_args()
    for policy in args.policy.split(","):
        random.seed(0)
        run_policy(policy, args)


def run_policy(policy: str, args: argparse.Namespace) -> None:
    """Soak a server of one policy, and print the results."""
    server_args = ("--kv-cache-tokens", "4096", *args.extra_server_args.split())
    num_instances = min(NUM_INSTANCES, policy_kind(policy).max_instances or NUM_INSTANCES)
    with TemporaryDirectory() as folder:
        config = ServerConfig(None, num_instances, 1, server_args, start_timeout=120.0)
        with spawn_server(config, policy, Path(folder) / "server.log") as url:
            one = Soak(url, child_pid(), args.prompt_words)
            samples = uvloop.run(soak(one, args.streams, 60 * args.minutes, args.sample_seconds))
            log = (Path(folder) / "server.log").read_text()
    print_table(samples)
    growth, outcomes = growth_kib(samples), dict(one.outcomes.most_common())
    num_errors = log.count(" ERROR ")
    print(
        f"\n{policy}: of {one.num_streams:,} streams: {outcomes}; growth {growth:.2f} KiB a stream; ", end=""
    )
    print(f"{num_errors} errors in the log")
    numbers = {
        "policy": policy,
        "num_errors": num_errors,
        "num_streams": one.num_streams,
        "seconds": samples[-1].seconds,
        "outcomes": outcomes,
        "growth_kib_per_stream": growth,
        "columns": ["seconds", "num_streams", *KINDS, "num_descriptors", "num_threads"],
        "samples": [
            [
                *(round(s.seconds), s.num_streams),
                *(round(s.memory_mib.get(kind, 0.0), 1) for kind in KINDS),
                *(s.num_descriptors, s.num_threads),
            ]
            for s in samples
        ],
    }
    print_result("soak", numbers, save=args.save)


if __name__ == "__main__":
    main()
