"""Measures `loong serve` on a GPU from its clients' side.

It starts servers with dummy weights and sends them streams over HTTP. `ttft`: one prompt at a time, to its
first token. `tpot`: a number of requests of 1,024 tokens at once, the median time between tokens while all of
them run. `kinds`: the same for 32, of which one or all ask for more than the likeliest token (a schema needs
xgrammar). `gaps`: the time that the GPU waits between two decode steps, from a trace. `offline`: 512 requests
of 1,000 tokens in and 1,000 out at once, with latency targets that are too loose to matter. Each is compared
with vLLM 0.26.0 on the same kind of machine, for the same model.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TypeAlias

import aiohttp
import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser
from step_gaps import gaps_of

from loong.runs.spawned_server import ServerConfig, spawn_server
from loong.workloads.client.client import Target, run_load
from loong.workloads.metrics.record import RequestRecord
from loong.workloads.request import RequestShape, TokenRun, WorkloadRequest

PARTS = ("ttft", "tpot", "kinds", "gaps", "offline")
VOCABULARY = 32000
TTFT_VLLM = {1024: 0.029, 8192: 0.212, 32768: 1.20, 131000: 10.2}  # seconds, of 131,072 tokens the last
TPOT_VLLM = {1: 4.70e-3, 32: 6.01e-3, 128: 10.2e-3}
OFFLINE_VLLM = 9660.0  # output tokens a second
TPOT_TOKENS = (1024, 300)  # in and out
NUM_OF_KINDS = 32
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 300}  # of more tokens than are asked for
KINDS: Mapping[str, Mapping[str, object]] = {
    "greedy": {},
    "sampled": {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logit bias": {"logit_bias": {"5": 1.5}},
    "log-probabilities": {"logprobs": 5},
    "least length": {"min_tokens": 200},
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "long", "schema": SCHEMA}},
        "ignore_eos": False,
    },
}
OFFLINE_TOKENS = (1000, 1000)
OFFLINE_FLAGS = (
    *("--target-ttft", "300", "--target-tpot", "1", "--max-step-time", "0.6"),
    *("--max-num-batched-tokens", "16384", "--lease-steps", "64", "--gpu-memory-utilization", "0.9"),
)
GAP_REQUESTS = (1, 256)
GAP_TOKENS = (1000, 2000)
TRACE_SECONDS = 2.5  # a few leases
NUM_SECONDS = 3.0  # of each length of `ttft`, but at least 3 runs

Kind: TypeAlias = tuple[int, Mapping[str, object]]  # number of requests, and their additional fields

seeds = count()  # no two prompts are alike


class Client:
    """Sends requests to one server."""

    def __init__(self, base_url: str, model: str) -> None:
        self._target = Target(base_url, model, VOCABULARY)

    def trace_of(self, num_requests: int) -> Path:
        """Return a trace of a moment at which `num_requests` requests decode; then they are aborted."""
        return asyncio.run(self._trace_of(num_requests))

    async def _trace_of(self, num_requests: int) -> Path:
        requests = equal_requests(num_requests, *GAP_TOKENS)
        async with aiohttp.ClientSession(self._target.base_url) as http:
            load = asyncio.create_task(run_load(self._target, requests))
            running = f'num_requests_running{{model_name="{self._target.model}"}} {num_requests}.0'
            while running not in await (await http.get("/metrics")).text():  # noqa: ASYNC110 - a poll
                await asyncio.sleep(0.1)
            await asyncio.sleep(1.0)
            await http.post("/start_profile")
            await asyncio.sleep(TRACE_SECONDS)
            written = await (await http.post("/stop_profile")).json()
            load.cancel()
        return Path(written["trace"])

    def send(self, num_requests: int, num_prompt_tokens: int, num_output_tokens: int) -> list[RequestRecord]:
        """Send equal requests at once; exit if one fails."""
        return self.send_kinds([(num_requests, {})], num_prompt_tokens, num_output_tokens)

    def send_kinds(
        self, kinds: Sequence[Kind], num_prompt_tokens: int, num_output_tokens: int
    ) -> list[RequestRecord]:
        """Send requests of each kind at once, all of one length; exit if one fails."""
        return asyncio.run(self._send(kinds, num_prompt_tokens, num_output_tokens))  # uvloop ticks in ms

    async def _send(
        self, kinds: Sequence[Kind], num_prompt_tokens: int, num_output_tokens: int
    ) -> list[RequestRecord]:
        loads = (
            run_load(
                replace(self._target, extra_body=extra),
                equal_requests(num_requests, num_prompt_tokens, num_output_tokens),
            )
            for num_requests, extra in kinds
        )
        records = list(chain.from_iterable(await asyncio.gather(*loads)))
        for record in records:
            if record.error is not None:
                raise SystemExit(f"a request failed: {record.error}")
        return records


def equal_requests(
    num_requests: int, num_prompt_tokens: int, num_output_tokens: int
) -> list[WorkloadRequest]:
    """Return requests that are due at once."""
    prompts = (TokenRun(next(seeds), num_prompt_tokens) for _ in range(num_requests))
    return [WorkloadRequest(0.0, RequestShape((prompt,), num_output_tokens)) for prompt in prompts]


Measure: TypeAlias = Callable[[Client], dict[str, object]]


def ttft(client: Client, lengths: Sequence[int]) -> dict[str, object]:
    """Return the seconds to the first token of one prompt, by its length."""
    rows: dict[str, object] = {}
    for length in lengths:
        vllm = TTFT_VLLM.get(length)
        (first,) = client.send(1, length, 2)
        records = [client.send(1, length, 2)[0] for _ in range(max(3, int(NUM_SECONDS / first.ttft)))]
        seconds = median(record.ttft for record in records)
        compared = "" if vllm is None else f"   vLLM {vllm * 1e3:>8.0f} ms"
        print(f"TTFT of {length:>7} tokens: {seconds * 1e3:>9.1f} ms{compared}")
        rows[str(length)] = {"seconds": seconds, "first": first.ttft, "vllm": vllm}
    return rows


def tpot(client: Client) -> dict[str, object]:
    """Return the seconds between tokens by the number of running requests."""
    rows: dict[str, object] = {}
    for num_requests, vllm in TPOT_VLLM.items():
        found = between_tokens(client.send(num_requests, *TPOT_TOKENS))
        print(f"TPOT of {num_requests:>4} requests: {shown(found)}   vLLM {vllm * 1e3:.2f} ms")
        rows[str(num_requests)] = {**found, "vllm": vllm}
    return rows


def kinds(client: Client) -> dict[str, object]:
    """Return the seconds between tokens by the additional fields of one of the requests, or of all."""
    rows: dict[str, object] = {}
    for name, extra in KINDS.items():
        client.send_kinds([(1, extra)], *TPOT_TOKENS)  # a schema's grammar is made once
        for num_asking in (1, NUM_OF_KINDS) if extra else (NUM_OF_KINDS,):
            asked: list[Kind] = [(num_asking, extra), (NUM_OF_KINDS - num_asking, {})]
            sent = client.send_kinds(asked, *TPOT_TOKENS)
            found = between_tokens(sent)
            print(f"TPOT of {NUM_OF_KINDS} requests, {f'{num_asking} {name}':<20}: {shown(found)}")
            rows[f"{num_asking} {name}"] = found
    return rows


def between_tokens(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Return the seconds from token to token while all run."""
    gaps = sorted(gaps_while_all_run(records))
    return {"seconds": median(gaps), "mean": sum(gaps) / len(gaps), "p99": gaps[int(0.99 * len(gaps))]}


def shown(found: Mapping[str, float]) -> str:
    seconds, mean, p99 = (found[name] * 1e3 for name in ("seconds", "mean", "p99"))
    return f"{seconds:>6.2f} ms (mean {mean:.2f}, P99 {p99:.2f})"


def gaps_while_all_run(records: Sequence[RequestRecord]) -> list[float]:
    """Return the seconds between the tokens of each request while all run."""
    begin = max(record.token_times[0] for record in records)
    end = min(record.token_times[-1] for record in records)
    return [
        gap
        for record in records
        for time, gap in zip(record.token_times, record.itls, strict=False)
        if begin <= time and time + gap <= end
    ]


def gaps(client: Client) -> dict[str, object]:
    """Return the seconds that the GPU waits inside a lease and between two."""
    client.trace_of(1)  # the first trace takes long to begin
    rows: dict[str, object] = {}
    for num_requests in GAP_REQUESTS:
        found = gaps_of(client.trace_of(num_requests))
        row = {
            name: {"median": median(values), "worst": max(values), "count": len(values)}
            for name, values in (("inside", found.inside), ("between", found.between))
            if values
        }
        reported = ", ".join(f"{name} {1e6 * value['median']:,.0f} us" for name, value in row.items())
        print(
            f"gaps with {num_requests:>4} requests: {reported} (steps of {1e3 * median(found.steps):.2f} ms)"
        )
        rows[str(num_requests)] = row
    return rows


def offline(client: Client, num_requests: int) -> dict[str, object]:
    """Return the output tokens a second from the first request sent to the last token."""
    records = client.send(num_requests, *OFFLINE_TOKENS)
    seconds = max(record.finish_time for record in records)
    rate = sum(record.num_output_tokens for record in records) / seconds
    last_ttft = max(record.ttft for record in records)
    print(f"offline: {rate:,.0f} output tokens/s in {seconds:.1f} s   vLLM {OFFLINE_VLLM:,.0f}")
    print(f"         the last request had its first token after {last_ttft:.1f} s")
    return {"tokens_per_second": rate, "seconds": seconds, "last_ttft": last_ttft, "vllm": OFFLINE_VLLM}


def measured(
    model: str, flags: Sequence[str], measures: Mapping[str, Measure], logs: Path | None
) -> dict[str, dict[str, object]]:
    """Return the results of each measure on a server that is started for them."""
    if not measures:
        return {}
    with TemporaryDirectory() as folder:
        traces = ("--trace-dir", str(logs or folder)) if "gaps" in measures else ()
        config = ServerConfig(model, 1, 1, (*flags, *traces), start_timeout=300.0)
        log = (logs or Path(folder)) / f"server-{'-'.join(measures)}.log"
        with spawn_server(config, "esp", log) as base_url:
            client = Client(base_url, model)
            client.send(8, 100, 20)  # warms up
            return {name: measure(client) for name, measure in measures.items()}


def main() -> None:
    parser = script_parser("engine", __doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="built-in shape of the model (%(default)s)")
    parser.add_argument("--device", default="cuda", help="device of the server (%(default)s)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (all)")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=list(TTFT_VLLM),
        help="prompt lengths of `ttft`, in tokens (%(default)s)",
    )
    parser.add_argument(
        "--num-requests", type=int, default=512, help="number of requests of `offline` (%(default)s)"
    )
    parser.add_argument("--server-args", default="", help="more flags for `loong serve`")
    parser.add_argument("--logs", type=Path, help="folder to keep the servers' logs in")
    args = parser.parse_args()
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    measures: Mapping[str, Measure] = {
        "ttft": partial(ttft, lengths=args.lengths),
        "tpot": tpot,
        "kinds": kinds,
        "gaps": gaps,
        "offline": partial(offline, num_requests=args.num_requests),
    }
    flags = ("--load-format", "dummy", "--device", args.device, *args.server_args.split())
    bounded = {part: measures[part] for part in args.parts if part != "offline"}
    unbounded = {part: measures[part] for part in args.parts if part == "offline"}
    found = measured(args.model, flags, bounded, args.logs)
    found |= measured(args.model, (*flags, *OFFLINE_FLAGS), unbounded, args.logs)
    numbers = {"model": args.model, "torch": torch.__version__, "server_args": args.server_args, **found}
    print_result("engine", numbers, save=args.save)


if __name__ == "__main__":
    main()
