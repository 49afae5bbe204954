"""Compares one request of n choices with n requests of the same prompt.

Both are sent in turn to a server of CPU instances. The script reports the seconds to the first token of all
and to the last. The decision log gives the prompt tokens computed, and the most KV held or reserved in a
plan. Seeds count up, so both must give the same texts. Ceiling of the KV of one request: its prompt once, and
the output of every choice.

    python benchmarks/scheduling/choices.py  # n = 8, a prompt of 4,096 tokens, half a minute
    python benchmarks/scheduling/choices.py --num-instances 4 --prompt-tokens 16384 --n 16 --save
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import aiohttp

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.observability.decision_log.lines import ArrivedLine, PlannedLine
from loong.observability.decision_log.reader import read_log
from loong.runs.spawned_server import ServerConfig, spawn_server
from loong.workloads.report.report import table

WAYS = ("one request", "many requests")
START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Round:
    """One of the two ways, run once: seconds, and the texts by choice."""

    first_tokens: float
    last_token: float
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """The tokens of a round, from the decision log."""

    num_prompt_computed: int
    most_kv: int


async def ask(session: aiohttp.ClientSession, bodies: Sequence[dict[str, object]]) -> Round:
    """Send all at once, and read them to their ends; choices are in the order of bodies and indexes."""
    begin = time.monotonic()
    answers = await asyncio.gather(*(read(session, body) for body in bodies))
    firsts = [first for answer in answers for first, _ in answer]
    texts = tuple(text for answer in answers for _, text in answer)
    return Round(max(firsts) - begin, time.monotonic() - begin, texts)


async def read(session: aiohttp.ClientSession, body: dict[str, object]) -> list[tuple[float, str]]:
    """Return when the first token of each choice came, and its text."""
    firsts: dict[int, float] = {}
    texts: dict[int, str] = {}
    async with session.post("/v1/completions", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                for part in json.loads(line.removeprefix(b"data: "))["choices"]:
                    firsts.setdefault(part["index"], time.monotonic())
                    texts[part["index"]] = texts.get(part["index"], "") + part["text"]
    return [(firsts[index], texts[index]) for index in sorted(firsts)]


async def measure(url: str, args: argparse.Namespace) -> dict[str, list[Round]]:
    """Run both ways in turn, after a round of each that does not count."""
    rounds: dict[str, list[Round]] = {way: [] for way in WAYS}
    body: dict[str, object] = {"max_tokens": args.output_tokens, "stream": True, "ignore_eos": True}
    async with aiohttp.ClientSession(url) as session:
        for number in range(args.rounds + 1):
            body["prompt"] = [random.Random(number).randrange(3, 250) for _ in range(args.prompt_tokens)]
            singles = [body | {"seed": seed} for seed in range(args.n)]
            for way, bodies in zip(WAYS, ([body | {"n": args.n, "seed": 0}], singles), strict=True):
                rounds[way].append(await ask(session, bodies))
                await asyncio.sleep(0.2)  # so that the log has an empty cluster in between
    for one, many in zip(*rounds.values(), strict=True):
        if one.texts != many.texts:
            raise SystemExit("choices differ from requests of their own with the same seeds")
    return {way: reported[1:] for way, reported in rounds.items()}


def held_by_round(path: Path) -> Iterator[Held]:
    """Yield the tokens computed and held from each arrival in an empty cluster to the next."""
    held = None
    for line in read_log(path):
        if isinstance(line, ArrivedLine) and not any(instance.kv_used for instance in line.instances):
            if held is not None and held.most_kv:
                yield held
                held = None
            held = held or Held(0, 0)
        if isinstance(line, PlannedLine) and held is not None:
            num_tokens = sum(chunk.num_tokens for batch in line.batches for chunk in batch.chunks)
            most_kv = max(held.most_kv, sum(instance.kv_used for instance in line.instances))
            held = Held(held.num_prompt_computed + num_tokens, most_kv)
    if held is not None:
        yield held


def main() -> None:
    parser = script_parser("choices", __doc__)
    parser.add_argument("--n", type=int, default=8, help="number of choices (%(default)s)")
    parser.add_argument(
        "--prompt-tokens", type=int, default=4096, help="length of the prompt in tokens (%(default)s)"
    )
    parser.add_argument(
        "--output-tokens", type=int, default=32, help="length of each output in tokens (%(default)s)"
    )
    parser.add_argument("--num-instances", type=int, default=2, help="number of instances (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds of each way (%(default)s)")
    args = parser.parse_args()
    room = args.n * (args.prompt_tokens + args.output_tokens)
    with TemporaryDirectory() as folder:
        log = Path(folder) / "decisions.jsonl"
        flags = ("--device", "cpu", "--kv-cache-tokens", str(room), "--decision-log", str(log))
        config = ServerConfig(None, args.num_instances, 1, flags, START_SECONDS)
        with spawn_server(config, "esp", Path(folder) / "server.log") as url:
            rounds = asyncio.run(measure(url, args))
        held = list(held_by_round(log))[len(WAYS) :]
    numbers: dict[str, object] = {
        name: getattr(args, name) for name in ("n", "prompt_tokens", "output_tokens", "num_instances")
    }
    rows = []
    for index, (way, reported) in enumerate(rounds.items()):
        first, last = (median(getattr(r, name) for r in reported) for name in ("first_tokens", "last_token"))
        mine = held[index :: len(WAYS)]
        computed, most = max(h.num_prompt_computed for h in mine), max(h.most_kv for h in mine)
        rows.append((way, f"{first:.3f}", f"{last:.3f}", f"{computed:,}", f"{most:,}"))
        numbers[way] = {"first": first, "last": last, "prompt_computed": computed, "most_kv": most}
    print(table(("", "s to all first tokens", "s to the last", "prompt tokens computed", "most KV"), rows))
    print(f"the prompt once, and all outputs: {args.prompt_tokens + args.n * (args.output_tokens - 1):,}")
    print_result("choices", numbers, save=args.save)


if __name__ == "__main__":
    main()
