"""Measures short requests and 500,000-token prompts together, in virtual time on H200 rooflines.

Chats of 512 tokens come ten times a second, with and without a long prompt every thirty seconds. Ceilings:
the chats' P99 TTFT with long prompts is at most 1.5 times that without. A long prompt takes at most 1.5 times
as long as on an idle cluster.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.hardware.model_shape import shape_of
from loong.model.shapes import find_config
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy
from loong.simulation.cluster import Hardware
from loong.simulation.config import Load
from loong.simulation.run import simulate
from loong.workloads.metrics.slo import parse_slo
from loong.workloads.report.report import table
from loong.workloads.request import WorkloadRequest
from loong.workloads.workload import make_workload

CEILING = 1.5
LONG = 100_000  # tokens of a prompt, from which it is one of the long ones


def ttfts(hardware: Hardware, policy: str, load: Sequence[WorkloadRequest]) -> list[tuple[int, float]]:
    """Return prompt length and TTFT of every request."""
    limits_of = parse_slo("tight").limits_of(hardware.unloaded_prefill())
    run = simulate(make_policy(policy, PolicyConfig()), hardware.cluster(policy), Load(load), limits_of)
    return [(record.request.num_prompt_tokens, record.ttft) for record in run.records if record.is_completed]


def main() -> None:
    parser = script_parser("victims", __doc__)
    parser.add_argument(
        "--model", nargs="+", default=["llama-3.1-8b", "lwm-1m"], help="models to simulate (%(default)s)"
    )
    parser.add_argument(
        "--policy",
        nargs="+",
        default=["esp", "esp-paper", "chunked", "replicas"],
        help="policies to compare (%(default)s)",
    )
    parser.add_argument("--num-instances", type=int, default=8, help="number of instances (%(default)s)")
    parser.add_argument("--num-requests", type=int, default=900, help="number of requests (%(default)s)")
    args = parser.parse_args()
    load = make_workload("victim-attacker", args.num_requests, seed=0, request_rate=10.0)
    chats = [request for request in load if request.num_prompt_tokens < LONG]
    rows, results = [], []
    for model in args.model:
        hardware = Hardware(shape_of(find_config(model, "dummy")), "h200", args.num_instances)
        for policy in args.policy:
            calm = float(np.quantile([ttft for _, ttft in ttfts(hardware, policy, chats)], 0.99))
            both = ttfts(hardware, policy, load)
            mixed = float(np.quantile([ttft for n, ttft in both if n < LONG], 0.99))
            longs = [ttft / hardware.unloaded_prefill()(n) for n, ttft in both if n >= LONG]
            slowest = max(longs, default=None)
            results.append([model, policy, calm, mixed, slowest])
            rows.append(
                (
                    model,
                    policy,
                    f"{1e3 * calm:.1f}",
                    f"{1e3 * mixed:.1f}",
                    f"{mixed / calm:.2f}x",
                    "refused" if slowest is None else f"{slowest:.2f}x",
                )
            )
    header = (
        "model",
        "policy",
        "P99 TTFT of chats alone, ms",
        "with long prompts, ms",
        "ratio",
        "slowest long prompt",
    )
    print(table(header, rows))
    print_result("victims", {"ceiling": CEILING, "rows": results}, save=args.save)


if __name__ == "__main__":
    main()
