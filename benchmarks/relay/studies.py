"""Runs RelayAttention's studies of whole systems, with its three systems as three sets of flags.

"none" keeps nothing of a prompt, as the paper's vLLM. "ps" shares the memory of a prefix and its computation
(vLLM-PS). "ra" also reads it once in a step (vLLM-RA).

    offline   figure 7: all requests at once, lengths of ShareGPT behind one system prompt of --prefix tokens
    fixed     figure 10: the same with fixed lengths behind it (64, 128), (128, 256) and (256, 512)
    mmlu      table 3: questions with 1, 3 and 5 shots, task after task; seconds for all of them
    poisson   figure 8: 1,000 requests at each --rate; the rate at 0.5 s a token

In virtual time unless --device is cpu or cuda, where `loong bench` starts a server for each system. A model
with one KV head for each query head and one with GQA show what GQA leaves: run both. Ceiling: the paper's
ratios on an A40 and an A100, printed with ours (docs/relay-attention.md says why they differ).

    python benchmarks/relay/studies.py offline --model llama-2-7b --simulate h200 --save

    python benchmarks/relay/studies.py offline mmlu poisson --model llama-2-7b --device cuda --save
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "support"))

from loong_runs import run_loong
from result import print_result, script_parser

from loong.hardware.model_shape import shape_of
from loong.model.shapes import find_config
from loong.simulation.cluster import Hardware
from loong.simulation.config import SimulateConfig, SimulatedLoadConfig
from loong.simulation.points import asked_of, run_point
from loong.workloads.metrics.slo import parse_slo

SYSTEMS = {"none": ("--no-enable-prefix-caching",), "ps": ("--no-relay",), "ra": ()}
AT_ONCE = 1e5  # requests per second: all come before the first has ended
FIXED = ((64, 128), (128, 256), (256, 512))
SHOTS = (1, 3, 5)
LATENCY = 0.5  # seconds a token
# The ratios of throughput that the paper publishes, or of seconds for table 3: to none, and to ps.
PUBLISHED = {
    "offline": "figure 7, A40 and A100s: ra 1.06 to 4.36 times none, ps up to 2.08 times",
    "fixed": "figure 10, A40: ra up to 2.2 times ps at a prefix of 2,048",
    "mmlu": "table 3, A100: with 1, 3 and 5 shots ra over ps 1.10, 1.22, 1.37, over none 1.64, 2.74, 4.14",
    "poisson": "figure 8, A40: up to 2.2 times the rate of none at 0.5 s a token",
}


class Load(NamedTuple):
    """A workload at a rate, and its name in tables."""

    name: str
    workload: str
    rate: float


def loads(study: str, args: Namespace) -> Iterator[Load]:
    """Yield the loads of a study."""
    match study:
        case "offline":
            for prefix in args.prefix:
                yield Load(f"s {prefix}", f"system-prompt({prefix})", AT_ONCE)
        case "fixed":
            for prefix in args.prefix:
                for given, out in FIXED:
                    yield Load(
                        f"s {prefix}, {given} + {out}", f"system-prompt({prefix},{given},{out})", AT_ONCE
                    )
        case "mmlu":
            for shots in SHOTS:
                yield Load(f"{shots} shots", f"mmlu-like({shots})", AT_ONCE)
        case _:
            for prefix in args.prefix:
                for rate in args.rate:
                    yield Load(f"s {prefix} at {rate:g}/s", f"system-prompt({prefix})", rate)


def run(load: Load, system: str, args: Namespace, folder: Path) -> dict[str, object]:
    """Return the numbers of a load on a system."""
    if args.device is None:
        return simulated(load, system, args)
    words = ["--model", args.model, "--policy", args.policy, "--num-instances", str(args.num_instances)]
    words += ["--workload", load.workload, "--rate", f"{load.rate:g}", "--seed", str(args.seed)]
    words += ["--num-requests", str(args.num_requests), "--length-scale", f"{args.length_scale:g}"]
    words += [*SYSTEMS[system], "--device", args.device, "--load-format", "dummy"]
    words.append(f"--extra-server-args={args.extra_server_args}")
    found = run_loong("bench", words, folder)["runs"][0]
    return {
        "output_throughput": found["output_throughput"],
        "seconds": found["duration"],
        "normalized_seconds": (found["mean_normalized_output_ms"] or 0.0) / 1e3,
        "relayed_tokens": found["num_relayed_tokens"],
        "failed": found["failed"],
    }


def simulated(load: Load, system: str, args: Namespace) -> dict[str, object]:
    """Return the same in virtual time."""
    config = SimulateConfig(
        args.model,
        (args.policy,),
        (parse_slo("tight"),),
        (load.rate,),
        Hardware(shape_of(find_config(args.model, "dummy")), args.simulate, args.num_instances),
        SimulatedLoadConfig(load.workload, args.seed, args.num_requests, length_scale=args.length_scale),
        keeps_prefixes="--no-enable-prefix-caching" not in SYSTEMS[system],
        relays="--no-relay" not in SYSTEMS[system],
    )
    found = run_point(config, asked_of(config, args.policy, config.rules[0], load.rate))
    normalized = found.metrics.latencies.normalized_output
    return {
        "output_throughput": found.metrics.output_throughput,
        "seconds": found.metrics.duration,
        "normalized_seconds": 0.0 if normalized is None else normalized["mean"],
        "relayed_tokens": found.counters.num_relayed_tokens,
        "failed": found.metrics.num_failed,
    }


def row_of(load: Load, args: Namespace) -> dict[str, object]:
    """Return what all systems make of a load."""
    row: dict[str, object] = load._asdict()
    for system in args.system:
        with TemporaryDirectory(prefix="loong-") as folder:
            row[system] = run(load, system, args, Path(folder))
    return row


def print_rows(study: str, rows: Sequence[dict[str, object]], systems: Sequence[str]) -> None:
    """Print tokens a second and seconds of each system, and the ratios to the first."""
    print(f"\n{study}; published: {PUBLISHED[study]}")
    print(
        f"{'':<24}" + "".join(f"{s + ' tokens/s':>16}{'s':>9}{'s/token':>10}" for s in systems) + "  ratios"
    )
    for row in rows:
        cells, speeds = "", []
        for system in systems:
            found = row[system]
            assert isinstance(found, dict)
            speeds.append(found["output_throughput"])
            cells += f"{speeds[-1]:>16.0f}{found['seconds']:>9.1f}{found['normalized_seconds']:>10.4f}"
        ratios = " ".join(f"{speed / speeds[0]:.2f}" for speed in speeds)
        print(f"{row['name']:<24}{cells}  {ratios}", flush=True)


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of loads and systems."""
    parser.add_argument("study", nargs="+", choices=PUBLISHED, help="what to run")
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="(all)")
    parser.add_argument("--model", default="llama-2-7b", help="(%(default)s)")
    parser.add_argument("--policy", default="replicas", help="one for all systems (%(default)s)")
    parser.add_argument("--simulate", default="h200", help="device in virtual time (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device of real servers (virtual time)")
    parser.add_argument("--num-instances", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--prefix", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048], metavar="S")
    parser.add_argument("--rate", type=float, nargs="+", default=[5, 10, 20, 30, 40], help="of poisson")
    parser.add_argument("--num-requests", type=int, default=1000, help="(%(default)s)")
    parser.add_argument("--length-scale", type=float, default=1.0, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--extra-server-args", default="", help="more flags of servers")


def main() -> None:
    parser = script_parser("relay_studies", __doc__)
    add_flags(parser)
    args = parser.parse_args()
    results = {}
    for study in args.study:
        results[study] = [row_of(load, args) for load in loads(study, args)]
        print_rows(study, results[study], args.system)
    asked = {
        "model": args.model,
        "device": args.device or f"simulated {args.simulate}",
        "policy": args.policy,
    }
    facts = {**asked, "num_requests": args.num_requests, "command": sys.argv[1:], "rows": results}
    print_result("relay_studies", facts, save=args.save)


if __name__ == "__main__":
    main()
