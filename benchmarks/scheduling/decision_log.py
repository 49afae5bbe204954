"""Measures the cost of the decision log for the engine: seconds to write a plan, and the tokens of a step.

Lines go into a file and, as in every server, to the listeners that keep the last ones and follow requests.
Requests decode in leases of 16 steps on 8 instances in the simulator; only the observer's calls are timed.
Ceiling at 64 requests: 0.1 ms a plan, 0.02 ms a step.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.core.applied import Applied
from loong.core.events import Event, TokensProduced
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.instructions import Instruction
from loong.core.plan import IterationPlan
from loong.core.request import Request, SamplingParams
from loong.core.snapshot import Snapshot
from loong.engine.loop import Scheduling
from loong.executor.simulated import SimulatedExecutor
from loong.observability.decision_log.log import DecisionLog, decision_log
from loong.observability.decision_log.recent import RecentLines
from loong.observability.decision_log.runs import RequestRuns
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.policy import make_policy
from loong.state.cluster_state import ClusterState

CEILINGS = {"plan_seconds": 1e-4, "step_seconds": 2e-5}
PROMPT_TOKENS, OUTPUT_TOKENS, NUM_INSTANCES = 200, 400, 8


class Timed:
    """A decision log whose calls are timed: those for leases of all requests, and those for their steps."""

    def __init__(self, log: DecisionLog, num_requests: int) -> None:
        self._log, self._num_requests = log, num_requests
        self.plans: list[float] = []
        self.steps: list[float] = []

    def on_event(self, event: Event, applied: Applied) -> None:
        """Pass an event on."""
        start = perf_counter()
        self._log.on_event(event, applied)
        if isinstance(event, TokensProduced) and len(event.tokens) == self._num_requests:
            self.steps.append(perf_counter() - start)

    def on_plan(
        self,
        events: Sequence[Event],
        snapshot: Snapshot,
        plan: IterationPlan,
        instructions: Sequence[Instruction],
    ) -> None:
        """Pass a plan on."""
        start = perf_counter()
        self._log.on_plan(events, snapshot, plan, instructions)
        if any(b.num_steps > 1 and len(b.queries) == self._num_requests for b in plan.batches):
            self.plans.append(perf_counter() - start)


async def measure(num_requests: int, path: Path) -> Timed:
    """Run requests that arrive together and go through their leases together."""
    instances = tuple(
        ElasticInstance(i, 1, InstanceKind.FULL, kv_capacity=num_requests * 700 // NUM_INSTANCES)
        for i in range(NUM_INSTANCES)
    )
    params, cost_model = SamplingParams(max_tokens=OUTPUT_TOKENS), WorkCostModel()
    requests = [
        Request(f"cmpl-{i:032x}", range(PROMPT_TOKENS), params, arrival_time=0.0) for i in range(num_requests)
    ]
    executor = SimulatedExecutor(cost_model, requests)
    policy = make_policy("static-sp", PolicyConfig())
    with decision_log(path, listeners=(RecentLines(), RequestRuns())) as log:
        timed = Timed(log, num_requests)
        async for _ in Scheduling(ClusterState(instances), policy, cost_model, executor, (timed,)).events():
            pass
    return timed


def main() -> None:
    parser = script_parser("decision_log", __doc__)
    parser.add_argument(
        "--num-requests",
        type=int,
        nargs="+",
        default=[8, 64, 256],
        help="numbers of requests to measure (%(default)s)",
    )
    args = parser.parse_args()
    print(f"{'requests':>10}{'us a plan':>12}{'us a step':>12}{'bytes':>12}")
    rows = []
    for num_requests in args.num_requests:
        with TemporaryDirectory() as directory:
            path = Path(directory) / "log"
            timed = asyncio.run(measure(num_requests, path))
            num_bytes = path.stat().st_size
        plan, step = median(timed.plans), median(timed.steps)
        print(f"{num_requests:>10}{1e6 * plan:>12.0f}{1e6 * step:>12.1f}{num_bytes:>12,}")
        rows.append({"num_requests": num_requests, "plan_seconds": plan, "step_seconds": step})
    print_result("decision_log", {"ceilings": CEILINGS, "rows": rows}, save=args.save)


if __name__ == "__main__":
    main()
