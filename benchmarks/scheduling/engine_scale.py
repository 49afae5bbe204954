"""One, 8 and 32 engines that plan for 512 instances together: planning time, throughput and attainment.

In virtual time, Llama-3.1-8B on H200s. Each engine plans for its share of the instances. Requests go, in
the order of their arrival, to the engine that got the least work so far, counted as by the router: prompt
tokens, and 64 of an output. Planning times are processor time on this machine. Needs no device.

    python benchmarks/scheduling/engine_scale.py
"""

import sys
from argparse import Namespace
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median, quantiles
from time import process_time

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.core.cost.cost_model import CostModel
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.hardware.model_shape import shape_of
from loong.model.shapes import SHAPES
from loong.processes.gc_tuning import tune_gc
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import Policy, make_policy
from loong.server.engines.routing import output_work
from loong.simulation.cluster import Hardware
from loong.simulation.config import Load
from loong.simulation.run import simulate
from loong.workloads.metrics.metrics import compute_metrics
from loong.workloads.metrics.slo import parse_slo
from loong.workloads.request import WorkloadRequest
from loong.workloads.workload import endless_workload

MODEL, DEVICE = "llama-3.1-8b", "h200"


@dataclass(frozen=True, slots=True)
class Row:
    """A number of engines. Planning times are seconds of one call; `busiest` is the most of one engine."""

    num_engines: int
    num_events: int
    median_plan_seconds: float
    p99_plan_seconds: float
    plan_seconds: float
    busiest_plan_seconds: float
    tokens_per_second: float
    attainment: float
    num_migrated_tokens: int


def routed(requests: list[WorkloadRequest], num_engines: int) -> list[list[WorkloadRequest]]:
    """Return the requests of each engine."""
    work, found = [0] * num_engines, [list[WorkloadRequest]() for _ in range(num_engines)]
    for request in requests:
        least = min(range(num_engines), key=work.__getitem__)
        work[least] += request.num_prompt_tokens + output_work(request.num_output_tokens, 1)
        found[least].append(request)
    return found


def timed(policy: Policy, seconds: list[float]) -> Policy:
    """Return the policy, which adds the time of each plan to `seconds`."""

    def plan_of(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        start = process_time()
        plan = policy(snapshot, cost_model)
        seconds.append(process_time() - start)
        return plan

    return plan_of


def measure(args: Namespace, num_engines: int, requests: list[WorkloadRequest]) -> Row:
    """Simulate the engines, one after another."""
    shape, num_instances = shape_of(SHAPES[MODEL]), args.num_instances
    limits_of = parse_slo(args.slo).limits_of(Hardware(shape, DEVICE, num_instances).unloaded_prefill())
    hardware = Hardware(shape, DEVICE, num_instances // num_engines)
    records, by_engine, num_events, num_moved = [], list[list[float]](), 0, 0
    for share in routed(requests, num_engines):
        policy, seconds = make_policy(args.policy, PolicyConfig()), list[float]()
        run = simulate(timed(policy, seconds), hardware.cluster(args.policy), Load(share), limits_of)
        records += run.records
        by_engine.append(seconds)
        num_events += run.num_events
        num_moved += run.stats.num_migrated_tokens
    metrics = compute_metrics(records, limits_of)
    plans = [second for seconds in by_engine for second in seconds]
    return Row(
        num_engines,
        num_events,
        median(plans),
        quantiles(plans, n=100)[-1],
        sum(plans),
        max(map(sum, by_engine)),
        metrics.output_throughput,
        metrics.attainment or 0.0,
        num_moved,
    )


def main() -> None:
    """Run each number of engines on the same requests."""
    parser = script_parser("engine_scale", __doc__)
    parser.add_argument("--policy", default="esp", help="policy to simulate (%(default)s)")
    parser.add_argument("--workload", default="mixed", help="workload to simulate (%(default)s)")
    parser.add_argument("--slo", default="tight", help="targets of requests (%(default)s)")
    parser.add_argument("--rate", type=float, default=60.0, help="requests per second (%(default)s)")
    parser.add_argument("--num-requests", type=int, default=4096, help="number of requests (%(default)s)")
    parser.add_argument("--num-instances", type=int, default=512, help="of all engines (%(default)s)")
    parser.add_argument("--num-engines", type=int, nargs="+", default=[1, 8, 32], help="(1 8 32)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (%(default)s)")
    args = parser.parse_args()
    tune_gc()
    workload = endless_workload(args.workload, seed=args.seed, request_rate=args.rate)
    requests, rows = list(islice(workload, args.num_requests)), list[Row]()
    for num_engines in args.num_engines:
        rows.append(measure(args, num_engines, requests))
        print(rows[-1], flush=True)
    print_result("engine_scale", {**vars(args), "rows": [asdict(row) for row in rows]}, save=args.save)


if __name__ == "__main__":
    main()
