"""Throughput on the nine traces of Infinite-LLM, in virtual time on A800s, for Llama-2-7B.

All requests of a trace arrive at once, or at a Poisson `--rate`. A policy's throughput is their number over
the time until the last one has ended. `infinite`, `infinite-paper` and `distkv` lend memory between
instances. `vllm-m` is the same without that, and `vllm-s` is one instance of all GPUs. A policy that refuses
a request as too long has none. The paper (arXiv 2401.02669) reports 1.35 to 1.73 times the throughput of
`vllm-m` on traces 0 to 2. On the others it reports 1.4 to 3.4 times that of `vllm-s`. No policy is above the
bound: all instances always busy, and steps that read no weights. Nor is one that computes a prompt on one
instance faster than its longest request alone. Needs no device.

    python benchmarks/evaluation/infinite_traces.py                                     # an hour
    python benchmarks/evaluation/infinite_traces.py --workload infinite-1 infinite-3    # minutes
    python benchmarks/evaluation/infinite_traces.py --workload infinite-0 --kv-cache-tokens 65536
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from goodput_cells import Cell
from result import print_result, script_parser

from loong.hardware.machine import num_processors
from loong.hardware.model_shape import shape_of
from loong.model.shapes import find_config
from loong.simulation.cluster import Hardware
from loong.simulation.parallel import in_order
from loong.simulation.points import asked_of, run_point
from loong.workloads.report.report import table
from loong.workloads.workload import endless_workload

WORKLOADS = tuple(f"infinite-{number}" for number in range(9))
LENDING = ("infinite", "infinite-paper", "distkv")
POLICIES = (*LENDING, "vllm-m", "vllm-s")
NUM_REQUESTS = {**dict.fromkeys(WORKLOADS[:3], 1_000), **dict.fromkeys(WORKLOADS[3:], 60)}
NUM_INSTANCES = {**dict.fromkeys(WORKLOADS[:7], 8), "infinite-7": 16, "infinite-8": 32}  # for the longest
AT_ONCE = 1e6  # requests per second


@dataclass(frozen=True, slots=True)
class Found:
    """A policy on a trace: completed requests per second, None if it refuses some, and KV moved and lent."""

    workload: str
    policy: str
    request_rate: float | None
    num_migrated_tokens: int | None
    num_served_tokens: int | None
    num_served_leases: int | None


def run(args: argparse.Namespace, asked: tuple[str, str]) -> Found:
    """Simulate a policy on a trace."""
    workload, policy = asked
    num_instances = args.num_instances or NUM_INSTANCES[workload]
    num_requests = args.num_requests or NUM_REQUESTS[workload]
    cell = Cell(
        workload, "tight", policy, args.seed, args.model, args.device, num_instances, 1, num_requests, 0.1
    )
    config = cell.config()
    hardware = replace(config.hardware, kv_cache_tokens=args.kv_cache_tokens)
    config = replace(config, is_per_class=False, hardware=hardware)
    point = run_point(config, asked_of(config, policy, config.rules[0], args.rate))
    is_whole, counters = point.metrics.num_completed == num_requests, point.counters
    return Found(
        workload,
        policy,
        point.metrics.request_throughput if is_whole else None,
        counters.num_migrated_tokens,
        counters.num_served_tokens,
        counters.num_served_leases,
    )


def bound_of(args: argparse.Namespace, workload: str) -> float:
    """Return the requests per second that no policy exceeds where one instance computes a prompt.

    That is the work of tokens and of KV, spread evenly, or the longest request, whose steps read all weights.
    """
    num_instances = args.num_instances or NUM_INSTANCES[workload]
    num_requests = args.num_requests or NUM_REQUESTS[workload]
    hardware = Hardware(shape_of(find_config(args.model, "dummy")), args.device, num_instances)
    cost_model = hardware.cluster("infinite").cost_model
    coefficients, terms, seconds = cost_model.coefficients, cost_model.prefill_terms(1), 0.0
    longest = 0.0
    for request in islice(endless_workload(workload, seed=args.seed, request_rate=AT_ONCE), num_requests):
        num_prompt, num_output = request.num_prompt_tokens, request.num_output_tokens
        prefill = terms.per_token * num_prompt + terms.per_new_pair * num_prompt**2
        reading = coefficients.decode_key * (num_prompt + num_output / 2)
        seconds += prefill + (num_output - 1) * (coefficients.token + reading)
        longest = max(longest, prefill + (num_output - 1) * coefficients.weights)
    return num_requests / max(seconds / num_instances, longest)


def rows(found: Sequence[Found], bounds: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Return a row for each workload: requests per second, and tokens that each lending policy moved."""
    by_workload: dict[str, list[Found]] = {}
    for each in found:
        by_workload.setdefault(each.workload, []).append(each)
    return [
        (
            workload,
            *("-" if each.request_rate is None else f"{each.request_rate:.3g}" for each in some),
            f"{bounds[workload]:.3g}",
            *(f"{each.num_migrated_tokens or 0:,}" for each in some if each.policy in LENDING),
        )
        for workload, some in by_workload.items()
    ]


def main() -> None:
    parser = script_parser("infinite_traces", __doc__)
    parser.add_argument("--policy", nargs="+", default=POLICIES, help=f"({' '.join(POLICIES)})")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=WORKLOADS, help="(all nine)")
    parser.add_argument("--model", default="llama-2-7b", help="model to simulate (%(default)s)")
    parser.add_argument("--device", default="a800", help="device to simulate (%(default)s)")
    parser.add_argument(
        "--num-instances", type=int, help="number of instances (8; 16 for infinite-7, then 32)"
    )
    parser.add_argument("--rate", type=float, default=AT_ONCE, help="requests per second (all at once)")
    parser.add_argument("--kv-cache-tokens", type=int, help="pool of an instance (what its device holds)")
    parser.add_argument("--num-requests", type=int, help="of each trace (1,000 of 0 to 2, 60 of the others)")
    parser.add_argument(
        "--jobs", type=int, default=num_processors(), help="number of parallel processes (one for each core)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (%(default)s)")
    args = parser.parse_args()
    asked = [(workload, policy) for workload in args.workload for policy in args.policy]
    found = in_order(
        partial(run, args), asked, args.jobs, lambda each: print(each, file=sys.stderr, flush=True)
    )
    moved = [f"KV moved by {policy}" for policy in args.policy if policy in LENDING]
    bounds = {workload: bound_of(args, workload) for workload in args.workload}
    print(table(("requests/s", *args.policy, "bound", *moved), rows(found, bounds)))
    command = shlex.join(["python", *sys.argv])
    print_result(
        "infinite_traces",
        {"command": command, "runs": [asdict(each) for each in found], "bounds": bounds},
        save=args.save,
    )


if __name__ == "__main__":
    main()
