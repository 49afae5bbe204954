"""Measures the simulation speed of clusters of growing size, and the planning time of an event.

The load grows with the cluster: 10,000 requests a minute on 512 instances. Ceiling: real time, that is, a
second simulates at least a second, at every size. With --served, plans use a cost model that is corrected, as
those of a server.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.core.cost.cost_model import CostModel
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.hardware.model_shape import shape_of
from loong.model.shapes import SHAPES
from loong.processes.gc_tuning import tune_gc
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.recalibration import RecalibratedCostModel, Recalibration
from loong.scheduler.policy import make_policy
from loong.simulation.cluster import Hardware
from loong.simulation.config import Load, SimulatedLoadConfig
from loong.simulation.run import simulate
from loong.workloads.metrics.slo import parse_slo

REQUESTS_PER_INSTANCE_SECOND = 10_000 / 60 / 512
MODEL, DEVICE, RULE = "llama-3.1-8b", "h200", "tight"
HEADER = ("instances", "requests", "events", "x real time", "events/s", "without policy", "plan us", "(P99)")


@dataclass(frozen=True, slots=True)
class Row:
    """One run; times in seconds, `plan_seconds` of all plans together."""

    num_instances: int
    num_requests: int
    num_events: int
    virtual_seconds: float
    wall_seconds: float
    plan_seconds: float
    median_plan_seconds: float
    p99_plan_seconds: float

    def shown(self) -> str:
        """Return a line of the table."""
        cells = (
            f"{self.num_instances}",
            f"{self.num_requests}",
            f"{self.num_events}",
            f"{self.virtual_seconds / self.wall_seconds:.1f}",
            f"{self.num_events / self.wall_seconds:.0f}",
            f"{self.num_events / (self.wall_seconds - self.plan_seconds):.0f}",
            f"{1e6 * self.median_plan_seconds:.0f}",
            f"({1e6 * self.p99_plan_seconds:.0f})",
        )
        return "".join(f"{cell:>16}" for cell in cells)


def measure(policy_name: str, workload: str, num_instances: int, duration: float, *, is_served: bool) -> Row:
    """Simulate `duration` seconds of arrivals to the end, and time every plan."""
    hardware = Hardware(shape_of(SHAPES[MODEL]), DEVICE, num_instances)
    limits_of = parse_slo(RULE).limits_of(hardware.unloaded_prefill())
    rate = REQUESTS_PER_INSTANCE_SECOND * num_instances
    load = Load(SimulatedLoadConfig(workload, duration=duration).at(rate).measured)
    policy, plan_seconds = make_policy(policy_name, PolicyConfig()), list[float]()
    cluster = hardware.cluster(policy_name)
    served = RecalibratedCostModel(Recalibration(cluster.cost_model))

    def timed(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        start = perf_counter()
        plan = policy(snapshot, served if is_served else cost_model)
        plan_seconds.append(perf_counter() - start)
        return plan

    start = perf_counter()
    run = simulate(timed, cluster, load, limits_of)
    return Row(
        num_instances=num_instances,
        num_requests=len(load.measured),
        num_events=run.num_events,
        virtual_seconds=max(record.finish_time for record in run.records),
        wall_seconds=perf_counter() - start,
        plan_seconds=sum(plan_seconds),
        median_plan_seconds=median(plan_seconds),
        p99_plan_seconds=quantiles(plan_seconds, n=100)[-1],
    )


def main() -> None:
    parser = script_parser("simulation", __doc__)
    parser.add_argument("--policy", default="esp", help="policy to simulate (%(default)s)")
    parser.add_argument("--workload", default="sharegpt", help="workload to simulate (%(default)s)")
    parser.add_argument(
        "--num-instances",
        type=int,
        nargs="+",
        default=[8, 32, 128, 512],
        help="numbers of instances (%(default)s)",
    )
    parser.add_argument(
        "--duration", type=float, default=60.0, help="duration of arrivals, in seconds (%(default)s)"
    )
    parser.add_argument(
        "--served", action="store_true", help="use a cost model that is corrected, as a server does"
    )
    args = parser.parse_args()
    tune_gc()  # as `loong simulate` does
    print(f"policy {args.policy}, {args.workload}, {args.duration:g} s of arrivals\n")
    print("".join(f"{name:>16}" for name in HEADER))
    rows = []
    for num_instances in args.num_instances:
        row = measure(args.policy, args.workload, num_instances, args.duration, is_served=args.served)
        print(row.shown())
        rows.append(asdict(row))
    numbers = {
        "policy": args.policy,
        "workload": args.workload,
        "model": MODEL,
        "device": DEVICE,
        "slo": RULE,
        "is_served": args.served,
        "rows": rows,
    }
    print_result("simulation", numbers, save=args.save)


if __name__ == "__main__":
    main()
