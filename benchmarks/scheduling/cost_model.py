"""Measures errors of predicted times on a real run: workers under a policy with a workload.

Each batch is predicted from its plan and the KV before it. The prediction is compared with the engine's time
from the commit until the whole group was done. The first tenth warms up. CPU instances share the cores of the
host: if more processes were busy than there are cores, the prediction is multiplied by their ratio, and the
batch is counted separately. Errors are predicted over measured seconds, less 1. "Corrected" is the median
error of predictions corrected by the batches before (`Calibration`). Then the workers run the same batches
again, at the same intervals. The floor is the median error of a perfect average, estimated from the two times
of each batch. Ceiling: a median error of 10 % of batches that had cores of their own, on a machine that does
nothing else.
"""

import asyncio
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import log, sqrt
from pathlib import Path
from statistics import fmean, median

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "support"))

from real_run import add_run_flags, chosen_load, chosen_workers, served
from result import print_result, script_parser
from same_batches import NotingExecutor, repeated

from loong.core.applied import Applied
from loong.core.cost.cost_model import CostModel
from loong.core.events import BatchFinished, Event
from loong.core.instructions import Instruction, RunBatch
from loong.core.placement import Placement
from loong.core.plan import BatchPlan, IterationPlan
from loong.core.request import Request, RequestId, SamplingParams
from loong.core.snapshot import Snapshot
from loong.engine.loop import Scheduling
from loong.executor.workers import WorkersExecutor
from loong.launcher.cluster.config import ClusterConfig
from loong.launcher.cluster.start import local_workers
from loong.profiling.measure import batch_sample
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.calibration import Calibration, kind_of
from loong.scheduler.cost.idle_tracker import IdleTracker
from loong.scheduler.policy import Policy, make_policy
from loong.state.cluster_state import ClusterState
from loong.workloads.report.report import table
from loong.workloads.request import SMALLEST_VOCABULARY, WorkloadRequest

CEILING = 0.10
MOST_INSTANCES = 4  # unless more are asked for
QUICKEST = 1.05  # busy processes over cores, up to which a batch had a core for each of its own


@dataclass(frozen=True, slots=True)
class Ran:
    """A batch, the KV before it, and when it ran."""

    batch_id: int
    plan: BatchPlan
    placements: Mapping[RequestId, Placement]
    started_at: float
    ended_at: float
    num_steps: int
    starts_idle: bool


class Watch:
    """Keeps every batch that ran, and the time from an event to its plan.

    It wraps the policy, to observe when a plan is ready.
    """

    def __init__(self, policy: Policy, executor: WorkersExecutor, idle_seconds: float) -> None:
        self.ran: list[Ran] = []
        self.planning: list[float] = []
        self._policy, self._executor = policy, executor
        self._planned_at = 0.0
        self._running: dict[int, tuple[RunBatch, float, bool]] = {}
        self._idle_tracker = IdleTracker(idle_seconds)

    def plan(self, snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        """Return the policy's plan."""
        plan = self._policy(snapshot, cost_model)
        self._planned_at = self._executor.now
        if plan.batches:
            self.planning.append(self._planned_at - snapshot.now)
        return plan

    def on_event(self, event: Event, _applied: Applied, /) -> None:
        """Record a batch that has finished."""
        if isinstance(event, BatchFinished):
            batch, started_at, starts_idle = self._running.pop(event.batch_id)
            self._idle_tracker.work(batch.plan.group.instance_ids, event.time)
            placements = {given.request_id: given.placement for given in batch.inputs}
            self.ran.append(
                Ran(
                    event.batch_id,
                    batch.plan,
                    placements,
                    started_at,
                    event.time,
                    event.num_steps,
                    starts_idle,
                )
            )

    def on_plan(
        self,
        _events: Sequence[Event],
        _snapshot: Snapshot,
        _plan: IterationPlan,
        instructions: Sequence[Instruction],
        /,
    ) -> None:
        """Record batches that start."""
        for instruction in instructions:
            if isinstance(instruction, RunBatch):
                starts_idle = self._idle_tracker.were_idle(
                    instruction.plan.group.instance_ids, self._planned_at
                )
                self._running[instruction.batch_id] = (instruction, self._planned_at, starts_idle)


@dataclass(frozen=True, slots=True)
class Served:
    """The observations of a load, and the factor in each batch's time when it ran again."""

    watch: Watch
    ratios: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Compared:
    """A batch's kind, its seconds, busy processes over cores, and relative errors of its prediction.

    The errors are without and with the correction learned before. `noise` is the relative deviation of its
    time from its average, estimated from two times.
    """

    kind: str
    measured: float
    crowding: float
    error: float
    corrected_error: float
    noise: float


def compare(served: Served, model: CostModel, tp_size: int, num_cores: int) -> list[Compared]:
    """Predict every batch but the first tenth, in the order in which they ended."""
    ran = served.watch.ran[len(served.watch.ran) // 10 :]
    compared, calibration = [], Calibration()
    for batch in ran:
        sample = batch_sample(batch.plan, batch.placements, batch.num_steps, starts_idle=batch.starts_idle)
        (work, _), *later = sample.steps
        seconds = batch.ended_at - batch.started_at
        busy = sum(overlap(batch, other) * other.plan.group.dop for other in ran) / seconds
        crowding = busy * tp_size / num_cores
        predicted = sample.predicted(model) * max(1.0, crowding)
        corrected = calibration.of(work).seconds(predicted)
        kind = f"{'lease' if later else work.phase.value}, DoP {batch.plan.group.dop}"
        noise = abs(log(served.ratios[batch.batch_id])) / sqrt(2)
        errors = predicted / seconds - 1, corrected / seconds - 1
        compared.append(Compared(kind, seconds, crowding, *errors, noise))
        calibration = calibration.observe(kind_of(work), predicted, seconds)
    return compared


def overlap(a: Ran, b: Ran) -> float:
    """Return the seconds in which both ran."""
    return max(0.0, min(a.ended_at, b.ended_at) - max(a.started_at, b.started_at))


async def serve(
    config: ClusterConfig, model: CostModel, policy_name: str, requests: Sequence[WorkloadRequest]
) -> Served:
    """Serve all requests as they come, then run the same batches again."""
    sent = [request_of(number, request) for number, request in enumerate(requests)]
    async with local_workers(config, lookahead=None) as executor:  # one by one, as they are repeated
        watch = Watch(make_policy(policy_name, PolicyConfig()), executor, model.host.idle)
        noted = NotingExecutor(executor)
        scheduling = Scheduling(ClusterState(config.instances), watch.plan, model, noted, (watch,))
        async for _ in served(scheduling, executor, sent):
            pass
        again = await repeated(noted, executor)
    return Served(watch, {i: again[i] / seconds for i, seconds in noted.ends.seconds.items()})


def request_of(number: int, sent: WorkloadRequest) -> Request:
    """Return the request that is sent, without an SLO."""
    return Request(
        f"r{number}",
        tuple(sent.prompt_token_ids(SMALLEST_VOCABULARY)),
        SamplingParams(max_tokens=sent.num_output_tokens, temperature=0.0),
        arrival_time=sent.arrival_time,
    )


def summary(rows: Iterable[Compared]) -> dict[str, float]:
    """Return the errors of some batches."""
    batches = list(rows)
    sizes = [abs(batch.error) for batch in batches]
    return {
        "num_batches": len(batches),
        "measured": median(batch.measured for batch in batches),
        "bias": median(batch.error for batch in batches),
        "median": median(sizes),
        "mean": fmean(sizes),
        "p95": float(np.quantile(sizes, 0.95)),
        "corrected": median(abs(batch.corrected_error) for batch in batches),
        "floor": median(batch.noise for batch in batches),
    }


def summaries(compared: Sequence[Compared]) -> dict[str, dict[str, float]]:
    """Return summaries by whether there was a core for each process, then by kind."""
    apart = [batch for batch in compared if batch.crowding <= QUICKEST]
    crowded = [batch for batch in compared if batch.crowding > QUICKEST]
    rows = {}
    for name, batches in (("a core each", apart), ("crowded", crowded)):
        if batches:
            rows[name] = summary(batches)
            for kind in sorted({batch.kind for batch in batches}):
                rows[f"{name}: {kind}"] = summary(batch for batch in batches if batch.kind == kind)
    return rows


def main() -> None:
    parser = script_parser("cost_model", __doc__)
    add_run_flags(parser, request_rate=10.0, num_requests=150)
    num_cores = len(os.sched_getaffinity(0))
    parser.set_defaults(num_instances=min(MOST_INSTANCES, num_cores))
    args = parser.parse_args()
    cluster, model = chosen_workers(args)
    compared: list[Compared] = []
    planning: list[float] = []
    for rate, seed in product(args.request_rate, args.workload_seed):
        seen = asyncio.run(serve(cluster, model, args.policy, chosen_load(args, rate, seed)))
        compared += compare(seen, model, cluster.tp_size, num_cores)
        planning += seen.watch.planning
    rows = summaries(compared)
    header = ("batches", "number", "median ms", "bias", "median error", "mean", "P95", "corrected", "floor")
    cells = [
        (
            name,
            str(row["num_batches"]),
            f"{1e3 * row['measured']:.2f}",
            *(f"{row[key]:.1%}" for key in ("bias", "median", "mean", "p95", "corrected", "floor")),
        )
        for name, row in rows.items()
    ]
    print(table(header, cells))
    print(f"\nfrom an event to the plan of a batch: {1e3 * median(planning):.2f} ms (median)\n")
    numbers = {
        "policy": args.policy,
        "workload": args.workload,
        "request_rate": args.request_rate,
        "num_instances": cluster.num_instances,
        "cost_model": str(args.cost_model),
        "ceiling": CEILING,
        "planning": median(planning),
        "rows": rows,
    }
    print_result("cost_model", numbers, save=args.save)


if __name__ == "__main__":
    main()
