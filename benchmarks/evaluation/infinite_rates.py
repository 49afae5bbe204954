"""Figure 10a of Infinite-LLM: throughput on traces 0 to 2 by Poisson rate, on 8, 16 and 32 instances.

As `infinite_traces.py`, with the pools of A100s of 80 GB and Llama-2-7B, in virtual time. The rate and the
number of requests grow with the instances: both are given for one. The paper reports 1.35 to 1.73 times the
throughput of `vllm-m`, and more on more instances. Needs no device.

    python benchmarks/evaluation/infinite_rates.py
"""

import shlex
import sys
from argparse import Namespace
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeAlias

sys.path.append(str(Path(__file__).parents[1] / "support"))

from infinite_traces import Found, run
from result import print_result, script_parser

from loong.hardware.machine import num_processors
from loong.simulation.parallel import in_order
from loong.workloads.report.report import table

POLICIES = ("vllm-m", "infinite", "infinite-paper", "distkv")
Asked: TypeAlias = tuple[str, int, float, str]
"""A trace, the number of instances, requests per second of each, and a policy."""


def measure(args: Namespace, asked: Asked) -> Found:
    """Simulate a policy on a trace at a rate."""
    workload, num_instances, rate, policy = asked
    given = {
        **vars(args),
        "num_instances": num_instances,
        "num_requests": args.num_requests * num_instances,
        "rate": rate * num_instances,
    }
    return run(Namespace(**given), (workload, policy))


def rows(found: dict[Asked, Found], policies: list[str]) -> list[tuple[str, ...]]:
    """Return a row for each trace, size and rate: throughput, and the tokens of KV that moved."""
    cells = dict.fromkeys(asked[:3] for asked in found)
    return [
        (
            workload,
            f"{num_instances}",
            f"{rate * num_instances:g}",
            *(
                f"{each.request_rate or 0:.3g} ({each.num_migrated_tokens or 0:,})"
                for each in (found[workload, num_instances, rate, policy] for policy in policies)
            ),
        )
        for workload, num_instances, rate in cells
    ]


def main() -> None:
    """Run all traces, sizes, rates and policies."""
    parser = script_parser("infinite_rates", __doc__)
    parser.add_argument("--policy", nargs="+", default=POLICIES, help=f"({' '.join(POLICIES)})")
    parser.add_argument("--workload", nargs="+", default=[f"infinite-{i}" for i in range(3)], help="(0 to 2)")
    parser.add_argument("--num-instances", nargs="+", type=int, default=[8, 16, 32], help="(8 16 32)")
    parser.add_argument("--rate", nargs="+", type=float, default=[1.5, 3.0], help="of an instance (1.5 3)")
    parser.add_argument("--num-requests", type=int, default=40, help="for each instance (%(default)s)")
    parser.add_argument("--kv-cache-tokens", type=int, help="pool of an instance (what its device holds)")
    parser.add_argument("--model", default="llama-2-7b", help="model to simulate (%(default)s)")
    parser.add_argument("--device", default="a800", help="device to simulate (%(default)s)")
    parser.add_argument("--jobs", type=int, default=num_processors(), help="processes (one for each core)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (%(default)s)")
    args = parser.parse_args()
    asked = [
        (workload, num_instances, rate, policy)
        for workload in args.workload
        for num_instances in args.num_instances
        for rate in args.rate
        for policy in args.policy
    ]
    results = in_order(partial(measure, args), asked, args.jobs, lambda each: print(each, file=sys.stderr))
    found = dict(zip(asked, results, strict=True))
    shown = [f"{policy} (KV moved)" for policy in args.policy]
    print(table(("trace", "instances", "sent/s", *shown), rows(found, args.policy)))
    runs = [
        {"num_instances": num_instances, "rate": rate * num_instances, **asdict(each)}
        for (_, num_instances, rate, _), each in found.items()
    ]
    print_result(
        "infinite_rates", {"command": shlex.join(["python", *sys.argv]), "runs": runs}, save=args.save
    )


if __name__ == "__main__":
    main()
