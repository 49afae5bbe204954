"""Compares other load generators with `loong bench`.

Each sends the same requests at the same times to a server whose answers come at known times: the first token
by the length of the prompt and then one every 20 ms. Requests are a file of Mooncake's format, with Poisson
arrivals and random lengths. The tools take turns with each of some such files. Their means of TTFT and TPOT
are compared with those of `loong bench`, and with the truth. --aiperf and --vllm name the programs of the
tools, in any environments. Exits with 1 if one differs by more than --tolerance, in the median.
"""

import asyncio
import json
import random
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.core.events import ProducedToken
from loong.core.request import NewRequest, TokenId
from loong.engine.client import EngineLimits, PutToken
from loong.model.tiny import CONFIG, tiny_model
from loong.runs.spawned_server import ENTRY
from loong.server.text.tokenizer import Tokenizer

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

from fuzzing import in_a_thread
from listening import serving_with
from scripted_engine import ScriptedEngine

NUM_REQUESTS, RATE = 24, 2.0  # a second
FIRST_SECONDS, SECONDS_A_PROMPT_TOKEN, SECONDS_A_TOKEN = 0.1, 1e-4, 0.02
LETTER: TokenId = 97
MODEL = "tiny"
PROMPT_TOKENS, OUTPUT_TOKENS = (256, 2048), (16, 48)
LIMITS = EngineLimits(max_model_len=2**16, max_request_kv=2**16, vocab_size=CONFIG.vocab_size)
BLOCK_TOKENS = 512  # of Mooncake's hashes
RUN_SECONDS = 180.0

Latencies: TypeAlias = Mapping[str, float]  # means in ms
Tool: TypeAlias = Callable[[str, Path, Path], Latencies]  # of an address, the trace and a folder


class PacedEngine(ScriptedEngine):
    """Answers every request as if there were no others, at times that follow from the request."""

    async def _produce(self, open_choices: dict[str, NewRequest], _replies: object, put: PutToken) -> None:
        now = asyncio.get_running_loop().time
        (request,) = open_choices.values()
        due = now() + first_seconds(len(request.prompt_token_ids))
        for number in range(1, request.sampling_params.max_tokens + 1):
            await asyncio.sleep(due - now())
            reason = request.sampling_params.finish_reason(number, LETTER)
            put(ProducedToken(request.request_id, LETTER, reason))
            due += SECONDS_A_TOKEN


def first_seconds(num_prompt_tokens: int) -> float:
    return FIRST_SECONDS + SECONDS_A_PROMPT_TOKEN * num_prompt_tokens


def write_trace(path: Path, seed: int) -> float:
    """Write requests with their times; return the mean TTFT that they will have."""
    chance, seconds, numbers = random.Random(seed), 0.0, count()
    lines = []
    for _ in range(NUM_REQUESTS):
        length = chance.randint(*PROMPT_TOKENS)
        fields = {
            "timestamp": round(1000 * seconds),
            "input_length": length,
            "output_length": chance.randint(*OUTPUT_TOKENS),
            "hash_ids": [next(numbers) for _ in range(0, length, BLOCK_TOKENS)],  # nothing is shared
        }
        lines.append(json.dumps(fields) + "\n")
        seconds += chance.expovariate(RATE)
    path.write_text("".join(lines))
    return mean(first_seconds(json.loads(line)["input_length"]) for line in lines)


def loong_bench(url: str, trace: Path, folder: Path) -> Latencies:
    command = [sys.executable, "-c", ENTRY, "bench", "--base-url", url, "--workload", f"trace:{trace}"]
    run([*command, "--length-scale", "1", "--num-requests", str(NUM_REQUESTS), "--output-dir", str(folder)])
    (reported,) = json.loads((folder / "results.json").read_text())["runs"]
    check_count(reported["completed"])
    return {"ttft": reported["mean_ttft_ms"], "tpot": reported["mean_tpot_ms"]}


def aiperf(program: str, tokenizer: Path) -> Tool:
    def measure(url: str, trace: Path, folder: Path) -> Latencies:
        lengths = folder / "lengths.jsonl"  # with hashes, 0.13 cannot read a tokenizer of this disk
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
        kept = [{name: line[name] for name in line if name != "hash_ids"} for line in lines]
        lengths.write_text("".join(json.dumps(line) + "\n" for line in kept))
        run(
            [
                *(program, "profile", "--url", url, "--model", MODEL, "--tokenizer", str(tokenizer)),
                *("--endpoint-type", "completions", "--streaming", "--use-server-token-count"),
                *(
                    "--input-file",
                    str(lengths),
                    "--custom-dataset-type",
                    "mooncake_trace",
                    "--fixed-schedule",
                ),
                *("--extra-inputs", "ignore_eos:true", "--artifact-dir", str(folder), "--ui", "none"),
            ]
        )
        (path,) = folder.rglob("profile_export_aiperf.json")
        reported = json.loads(path.read_text())
        check_count(reported["request_count"]["avg"])
        return {
            "ttft": reported["time_to_first_token"]["avg"],
            "tpot": reported["inter_token_latency"]["avg"],
        }

    return measure


def vllm(program: str, tokenizer: Path) -> Tool:
    def measure(url: str, trace: Path, folder: Path) -> Latencies:
        run(
            [
                *(program, "bench", "serve", "--backend", "openai", "--base-url", url),
                *("--model", MODEL, "--tokenizer", str(tokenizer), "--num-prompts", str(NUM_REQUESTS)),
                *("--dataset-name", "timed_trace", "--dataset-path", str(trace)),
                *("--timed-trace-sec-multiplier", "0.001"),
                *("--timed-trace-chunk-hash-size", str(BLOCK_TOKENS)),
                *("--save-result", "--result-dir", str(folder), "--result-filename", "results.json"),
            ]
        )
        reported = json.loads((folder / "results.json").read_text())
        check_count(reported["completed"])
        return {"ttft": reported["mean_ttft_ms"], "tpot": reported["mean_tpot_ms"]}

    return measure


def check_count(number: float) -> None:
    if number != NUM_REQUESTS:
        raise SystemExit(f"{number:g} of {NUM_REQUESTS} requests were served")


def run(command: list[str]) -> None:
    """Run a tool; if it fails, exit with its last output."""
    reported = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    if reported.returncode:
        last = "\n".join((reported.stdout + reported.stderr).splitlines()[-15:])
        raise SystemExit(f"{shlex.join(command)} ended with {reported.returncode}:\n{last}")


def measure(tools: Mapping[str, Tool], url: str, folder: Path, repeat: int) -> dict[str, list[Latencies]]:
    """Return the means of each tool's runs; all tools send a trace before the next is made."""
    found: dict[str, list[Latencies]] = {name: [] for name in tools}
    for number in range(repeat):
        trace = folder / f"trace-{number}.jsonl"
        truth = write_trace(trace, number)
        print(f"trace {number}: ttft {1e3 * truth:.2f} ms, tpot {1e3 * SECONDS_A_TOKEN:.2f} ms is the truth")
        for name, tool in tools.items():
            outputs = folder / f"{name}-{number}"
            outputs.mkdir()
            found[name].append(latencies := tool(url, trace, outputs))
            reported = ", ".join(f"{what} {ms:.2f} ms" for what, ms in latencies.items())
            print(f"{name}, trace {number}: {reported}", flush=True)
    return found


def differences(found: Mapping[str, list[Latencies]]) -> dict[str, dict[str, float]]:
    """Return a tool's mean relative to that of `loong bench`, minus 1, in the median of the traces."""
    own = found["loong bench"]
    return {
        name: {what: median(b[what] / a[what] - 1 for a, b in zip(own, runs, strict=True)) for what in own[0]}
        for name, runs in found.items()
        if runs is not own
    }


def main() -> None:
    parser = script_parser("load_tools", __doc__)
    parser.add_argument("--aiperf", metavar="PROGRAM", help="program of AIPerf, such as env/bin/aiperf")
    parser.add_argument("--vllm", metavar="PROGRAM", help="program of vLLM, such as env/bin/vllm")
    parser.add_argument(
        "--repeat", type=int, default=3, help="number of traces that each tool sends (%(default)s)"
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.05, help="largest relative difference of a mean (%(default)s)"
    )
    args = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_model(folder)
        tools: dict[str, Tool] = {"loong bench": loong_bench}
        if args.aiperf:
            tools["aiperf"] = aiperf(args.aiperf, model)
        if args.vllm:
            tools["vllm"] = vllm(args.vllm, model)
        serving = serving_with(Tokenizer.from_folder(model, CONFIG.eos_token_ids))
        with in_a_thread(serving(PacedEngine(limits=LIMITS))) as url:
            found = measure(tools, url, folder, args.repeat)
    differ = differences(found)
    for tool, by_latency in differ.items():
        for what, part in by_latency.items():
            print(f"{tool}: {what} {100 * part:+.1f} % of what loong bench measures")
    numbers: dict[str, Any] = {"means_ms": found, "differences": differ}
    print_result("load_tools", numbers, save=args.save)
    if any(abs(part) > args.tolerance for reported in differ.values() for part in reported.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
