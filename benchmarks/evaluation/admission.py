"""Admission by declared maxima, and by expected lengths, where answers are shorter than their maxima.

Each load is simulated under both rules, on instances with little room for KV. `declared` is the max_tokens
of all requests: with 0, each declares the length of its own answer. Needs no device.

    python benchmarks/evaluation/admission.py                                   # ten minutes
"""

import argparse
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.hardware.model_shape import shape_of
from loong.model.shapes import find_config
from loong.scheduler.config import AdmissionRule, PolicyConfig
from loong.simulation.cluster import Hardware
from loong.simulation.config import SimulateConfig, SimulatedLoadConfig
from loong.simulation.points import asked_of, run_point
from loong.workloads.metrics.slo import parse_slo
from loong.workloads.report.report import table

SLO = "tight"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run; `ttft_median` and `ttft_p99` are in milliseconds."""

    workload: str
    rate: float
    declared: int
    policy: str
    admission: str
    attainment: float | None
    ttft_median: float
    ttft_p99: float
    seconds: float
    num_preemptions: int | None


def outcomes(args: argparse.Namespace) -> Iterator[Outcome]:
    """Simulate each load under both rules."""
    for rate in args.rate:
        for declared in args.declared:
            for policy in args.policy:
                for rule in AdmissionRule:
                    yield outcome(args, rate, declared, policy, rule)


def outcome(
    args: argparse.Namespace, rate: float, declared: int, policy: str, rule: AdmissionRule
) -> Outcome:
    """Simulate one load under one rule."""
    shape = shape_of(find_config("llama-3.1-8b", "dummy"))
    config = SimulateConfig(
        "llama-3.1-8b",
        (policy,),
        (parse_slo(SLO),),
        (rate,),
        Hardware(shape, "h200", args.num_instances, kv_cache_tokens=args.kv_cache_tokens),
        SimulatedLoadConfig(args.workload, args.seed, args.num_requests, declared_tokens=declared),
        policy=PolicyConfig(admission=rule),
    )
    result = run_point(config, asked_of(config, policy, config.rules[0], rate))
    ttft = result.metrics.latencies.ttft
    assert ttft is not None
    return Outcome(
        args.workload,
        rate,
        declared,
        policy,
        rule.value,
        result.metrics.attainment,
        ttft["median"] * 1e3,
        ttft["p99"] * 1e3,
        result.metrics.duration,
        result.counters.num_preemptions,
    )


def row(found: Outcome) -> tuple[str, ...]:
    """Return a row of the table."""
    return (
        f"{found.rate:g}",
        str(found.declared or "own length"),
        found.policy,
        found.admission,
        "-" if found.attainment is None else f"{found.attainment:.1%}",
        f"{found.ttft_median:.0f}",
        f"{found.ttft_p99:.0f}",
        f"{found.seconds:.1f}",
        str(found.num_preemptions),
    )


def main() -> None:
    parser = script_parser("admission", __doc__)
    parser.add_argument("--workload", default="sharegpt", help="(%(default)s)")
    parser.add_argument("--policy", nargs="*", default=["esp"], help="(esp)")
    parser.add_argument(
        "--rate", type=float, nargs="*", default=[16.0, 32.0], help="requests per second (16 32)"
    )
    parser.add_argument("--declared", type=int, nargs="*", default=[0, 1024, 4096], help="(0 1024 4096)")
    parser.add_argument("--num-instances", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--kv-cache-tokens", type=int, default=40_000, help="(%(default)s)")
    parser.add_argument("--num-requests", type=int, default=400, help="of each run (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (%(default)s)")
    args = parser.parse_args()
    found = []
    for one in outcomes(args):
        found.append(one)
        print(one, file=sys.stderr, flush=True)
    header = ("req/s", "declared", "policy", "admission", "SLO", "TTFT p50 ms", "TTFT p99 ms", "s")
    print(table((*header, "preempted"), list(map(row, found))))
    runs = list(map(asdict, found))
    print_result("admission", {"command": shlex.join(["python", *sys.argv]), "runs": runs}, save=args.save)


if __name__ == "__main__":
    main()
