"""Sends the requests of LoongServe's released benchmark client, and prints the same means.

A request is a POST to `/generate_stream` of greedy decoding to a given length. Arrivals are a Poisson
process, stretched to the request rate. The time to the first token is that of the first bytes of the body.
Prompts are random words; `--dataset` takes a file of the released client instead, and `--write` makes one for
it. Without `--base-url`, the script starts a server with the tiny model on two CPU instances.
"""

import asyncio
import json
import marshal
import random
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from aiohttp import ClientSession, ClientTimeout

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

if TYPE_CHECKING:
    from collections.abc import Iterator

WORDS = ("the", "sea", "is", "wide", "and", "green", "while", "a", "bird", "sings", "over", "old", "stones")
LENGTHS, OUTPUT_LENGTHS = (40, 120, 400, 900), (8, 16, 32)  # characters, which are tokens of the tiny model


@dataclass(frozen=True)
class Prompt:
    """One request of a dataset; lengths are in tokens."""

    text: str
    num_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class Timing:
    """The times when a request was sent, had its first bytes, and was answered, in seconds."""

    prompt: Prompt
    sent_at: float
    first_at: float
    ended_at: float
    num_events: int

    @property
    def latency(self) -> float:
        """Seconds to the end of the answer."""
        return self.ended_at - self.sent_at

    @property
    def ttft(self) -> float:
        """Seconds to the first bytes."""
        return self.first_at - self.sent_at

    @property
    def tpot(self) -> float:
        """Seconds for each later token."""
        return (self.ended_at - self.first_at) / max(1, self.prompt.num_output_tokens - 1)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the answer."""
        return self.prompt.num_tokens + self.prompt.num_output_tokens


def main() -> None:
    parser = script_parser("loongserve_client", __doc__)
    parser.add_argument("--base-url", metavar="URL", help="address of a running server (default: start one)")
    parser.add_argument("--dataset", type=Path, metavar="FILE", help="dataset file of the released client")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="file to write the dataset to, without sending it"
    )
    parser.add_argument("--num-requests", type=int, default=24, help="number of requests (24)")
    parser.add_argument("--request-rate", type=float, default=2.0, help="requests per second (2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and arrivals (0)")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    prompts = read(args.dataset) if args.dataset else [words(draw) for _ in range(args.num_requests)]
    if args.write:
        rows = [(prompt.text, prompt.num_tokens, prompt.num_output_tokens) for prompt in prompts]
        args.write.write_bytes(marshal.dumps({"dataset_name": "words", "data": rows}))
        return
    with server(args.base_url) as url:
        timings = asyncio.run(run(url, prompts[: args.num_requests], args.request_rate, draw))
    report(args, timings)


def read(path: Path) -> list[Prompt]:
    """Return the prompts of a dataset of the released client."""
    return [Prompt(*row) for row in marshal.loads(path.read_bytes())["data"]]


def words(draw: random.Random) -> Prompt:
    """Return a prompt of random words."""
    length = draw.choice(LENGTHS)
    text = " ".join(draw.choices(WORDS, k=length))[:length]
    return Prompt(text, length + 1, draw.choice(OUTPUT_LENGTHS))


@contextmanager
def server(base_url: str | None) -> "Iterator[str]":
    """Yield the address of the server that is given, or else of one that lives as long as the context."""
    if base_url is not None:
        yield base_url
        return
    from loong.runs.spawned_server import ServerConfig, spawn_server

    config = ServerConfig(None, 2, 1, ("--kv-cache-tokens", "8192"), start_timeout=120.0)
    with TemporaryDirectory() as folder, spawn_server(config, "esp", Path(folder) / "log") as url:
        yield url


async def run(url: str, prompts: Sequence[Prompt], rate: float, draw: random.Random) -> list[Timing]:
    """Send all prompts at their times, without waiting for answers."""
    arrivals = [0.0]
    for _ in prompts[1:]:
        arrivals.append(arrivals[-1] + draw.expovariate(1.0))
    factor = len(prompts) / rate / arrivals[-1] if arrivals[-1] else 0.0
    async with ClientSession(timeout=ClientTimeout(total=6 * 3600)) as session:

        async def at(seconds: float, prompt: Prompt) -> Timing:
            await asyncio.sleep(seconds)
            return await send(session, f"{url}/generate_stream", prompt)

        return await asyncio.gather(*(at(t * factor, p) for t, p in zip(arrivals, prompts, strict=True)))


async def send(session: ClientSession, address: str, prompt: Prompt) -> Timing:
    """Send one prompt, and read the stream as bytes."""
    parameters = {"do_sample": False, "ignore_eos": True, "max_new_tokens": prompt.num_output_tokens}
    sent_at, first_at, body = time.perf_counter(), 0.0, b""
    async with session.post(address, json={"inputs": prompt.text, "parameters": parameters}) as answer:
        answer.raise_for_status()
        async for piece in answer.content.iter_any():
            first_at = first_at or time.perf_counter()
            body += piece
    events = [json.loads(line.removeprefix(b"data:")) for line in body.split(b"\n") if line]
    if not events[-1].get("finished"):
        raise RuntimeError(f"the stream ended with {events[-1]}")
    return Timing(prompt, sent_at, first_at, time.perf_counter(), len(events))


def report(args: Namespace, timings: Sequence[Timing]) -> None:
    """Print the means of the released client, and all in one line of JSON."""
    seconds = max(t.ended_at for t in timings) - min(t.sent_at for t in timings)
    rows = {
        "num_requests": len(timings),
        "num_events": sum(t.num_events for t in timings),
        "test_duration_ms": seconds * 1e3,
        "request_throughput": len(timings) / seconds,
        "avg_per_token_latency_ms": fmean(t.latency / t.num_tokens for t in timings) * 1e3,
        "avg_input_token_latency_ms": fmean(t.ttft / t.prompt.num_tokens for t in timings) * 1e3,
        "avg_output_token_latency_ms": fmean(t.tpot for t in timings) * 1e3,
        "avg_latency_ms": fmean(t.latency for t in timings) * 1e3,
        "avg_prompt_latency_ms": fmean(t.ttft for t in timings) * 1e3,
    }
    for name, value in rows.items():
        print(f"{name:28s} {value:10.3f}" if isinstance(value, float) else f"{name:28s} {value:6d}")
    print_result("loongserve_client", rows | {"request_rate": args.request_rate}, save=args.save)


if __name__ == "__main__":
    main()
