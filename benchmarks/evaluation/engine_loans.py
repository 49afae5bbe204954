"""Measures what loans of room between two engines gain, where one has all long contexts and the other none.

A server of the tiny model has two engines of one CPU instance each, without and with `--lend`. All requests
are about one document, which one engine has cached, so the router sends them there. Together they exceed its
room. Last comes a request that no engine has room for alone: without loans it is refused. Both kinds of
server are asked in turn, in several rounds. A pause is the time between two tokens of a stream: those of
requests whose KV moves are the longest.
"""

import asyncio
import json
import re
import sys
from argparse import Namespace
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from time import perf_counter

import httpx

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.runs.spawned_server import ServerConfig, spawn_server

FLAGS = ("--num-engines", "2", "--dtype", "float32")
COUNTS = (
    "vllm:num_preemptions",
    "loong:recomputed_tokens",
    "loong:kv_migrated_tokens",
    "loong:kv_served_tokens",
)


async def burst(url: str, load: Namespace) -> dict[str, float]:
    """Return the time of a burst, its times to first tokens, its pauses, and the answer to the longest."""
    document = [5 + 11 * i % 90 for i in range(load.document)]
    firsts, pauses = list[float](), list[float]()

    async def ask(prompt: list[int], max_tokens: int) -> float | None:
        """Return the seconds to the first token; None if the request is refused."""
        started, first, last = perf_counter(), None, 0.0
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            if answer.status_code == 400:
                return None
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = perf_counter()
                if first is None:
                    first = now - started
                else:
                    pauses.append(now - last)
                last = now
        return first

    async def question(number: int) -> None:
        first = await ask([*document, *(5 + (7 * i + number) % 90 for i in range(40))], load.answer)
        assert first is not None, "each fits into the room of an engine"
        firsts.append(first)

    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=1000)) as client:
        await ask(document, 1)
        started = perf_counter()
        await asyncio.gather(*map(question, range(load.questions)))
        seconds = perf_counter() - started
        longest = await ask([5 + 13 * i % 90 for i in range(load.pool * 3 // 2)], 16)
    firsts.sort()
    pauses.sort()
    return {
        "seconds": seconds,
        "tokens_per_second": load.questions * load.answer / seconds,
        "mean_ttft": mean(firsts),
        "p90_ttft": firsts[int(0.9 * len(firsts))],
        "median_pause": median(pauses),
        "p999_pause": pauses[int(0.999 * len(pauses))],
        "longest_pause": pauses[-1],
        "answers_longest": float(longest is not None),
        "ttft_longest": -1.0 if longest is None else longest,
    }


def counts(url: str) -> dict[str, float]:
    """Return sums of counters over all engines."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return {
        name: sum(map(float, re.findall(rf"^{name}_total{{[^}}]*}} (\S+)$", text, re.MULTILINE)))
        for name in COUNTS
    }


def main() -> None:
    """Run both servers, round after round."""
    parser = script_parser("engine_loans", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pool", type=int, default=4096, help="tokens of KV an instance (%(default)s)")
    parser.add_argument("--questions", type=int, default=12, help="requests of a burst (%(default)s)")
    parser.add_argument("--document", type=int, default=2000, help="tokens of the document (%(default)s)")
    parser.add_argument("--answer", type=int, default=500, help="tokens of an answer (%(default)s)")
    args = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    for _ in range(args.rounds):
        for name, more in (("without", ()), ("with", ("--lend",))):
            flags = (*FLAGS, "--kv-cache-tokens", str(args.pool), *more)
            with TemporaryDirectory() as folder:
                config = ServerConfig(None, 2, 1, flags, start_timeout=300.0)
                with spawn_server(config, "esp", Path(folder) / "server.log") as url:
                    before = counts(url)
                    numbers = asyncio.run(burst(url, args))
                    after = counts(url)
            runs[name].append({**numbers, **{key: after[key] - before[key] for key in COUNTS}})
            print(name, json.dumps(runs[name][-1]))
    medians = {
        name: {key: round(median(run[key] for run in found), 3) for key in found[0]}
        for name, found in runs.items()
    }
    print(json.dumps(medians, indent=2))
    print_result("engine_loans", {"load": vars(args), "medians": medians, "runs": runs}, save=args.save)


if __name__ == "__main__":
    main()
