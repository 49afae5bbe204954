"""Measures the engine's processor time for a plan: apply, snapshot, policy, check and commit.

Many requests arrive at once in the simulator, with KV room for half of them. Plans count that are made while
at least a quarter of the requests runs and a quarter waits, up to --max-events, with all their events. Groups
run at their own pace: between two plans most running requests have got tokens, so most views are new. Growth
is the time's factor over the number of requests', from the row above: 1 is linear. Ceiling at 64 running and
64 waiting on 8 instances: 0.5 ms, of which 0.15 ms without the policy.

With --bursts, a number of requests arrives at once, on 8 instances with room for half of them. The whole loop
runs to their end. It reports CPU time for each request until all have arrived and been planned for once. It
also reports the time until all have ended, and the number of plans.

Cases in which no request fits one instance are left out. The policy `refill` does the least that a policy can
do, to measure the other parts at any size.
"""

import asyncio
import gc
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from operator import attrgetter
from pathlib import Path
from statistics import median, quantiles
from time import process_time, thread_time
from typing import ParamSpec, TypedDict, TypeVar

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.core.cost.cost_model import CostModel
from loong.core.events import RequestArrived, TokensProduced
from loong.core.instance import ElasticInstance, ESPGroup, InstanceKind
from loong.core.placement import InstanceId, KVSegment
from loong.core.plan import BatchPlan, IterationPlan, QueryBlock, Transfer
from loong.core.request import Request, RequestView, SamplingParams
from loong.core.snapshot import Snapshot
from loong.engine.loop import Scheduling
from loong.executor.simulated import SimulatedExecutor
from loong.processes.gc_tuning import tune_gc
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.policy import Policy, make_policy
from loong.state.cluster_state import ClusterState

CEILING = 0.5e-3
PARTS, IDLE_SECONDS = ("apply", "snapshot", "policy", "check and commit"), "all but policy"
MEAN_TOKENS, MAX_TOKENS = 320, 480  # of one request, prompt and output
NUM_BURST_INSTANCES = 8
LEASE_STEPS = PolicyConfig().lease_steps

P = ParamSpec("P")
T = TypeVar("T")


class Row(TypedDict):
    """Medians and P95 by part."""

    num_requests: int
    num_instances: int
    seconds: dict[str, tuple[float, float]]


def crowd(num_requests: int) -> Iterator[Request]:
    """Yield requests with prompts of 100 to 299 tokens and outputs of 60 to 179."""
    for i in range(num_requests):
        params = SamplingParams(max_tokens=60 + i * 53 % 120)
        yield Request(f"r{i}", range(100 + i * 37 % 200), params, arrival_time=0.0)


def refill(snapshot: Snapshot, _cost_model: CostModel, /) -> IterationPlan:
    """Plan for each idle instance the requests that it has room for, or those it has."""
    not_in_flight: defaultdict[InstanceId, list[RequestView]] = defaultdict(list)
    for view in snapshot.running:
        if view.is_plannable:
            not_in_flight[view.placement.instance_ids[0]].append(view)
    waiting = deque(snapshot.waiting)
    batches = []
    for instance in filter(attrgetter("is_idle"), snapshot.instances):
        old, new = not_in_flight[instance.instance_id], list[RequestView]()
        free = instance.kv_capacity - sum(map(max_kv, old))
        while waiting and (free := free - max_kv(waiting[0])) >= 0:
            new.append(waiting.popleft())
        if new or old:
            batches.append(whole_batch(instance.instance_id, new or old, 1 if new else LEASE_STEPS))
    return IterationPlan(tuple(batches))


def max_kv(view: RequestView) -> int:
    """Return the most tokens that a request may come to hold."""
    return view.num_prompt_tokens + view.max_tokens


def whole_batch(instance_id: InstanceId, views: list[RequestView], num_steps: int) -> BatchPlan:
    """Return all uncomputed tokens of some requests on one instance: a prompt each, or a lease."""
    queries, writes = [], []
    for view in views:
        first = view.num_computed_tokens
        new = range(first, view.num_known_tokens)
        queries.append(QueryBlock(view.request_id, new, instance_id, Transfer.QUERY))
        stop = new.stop if num_steps == 1 else first + min(num_steps, view.num_remaining_tokens)
        writes.append(KVSegment(view.request_id, range(first, stop), instance_id))
    return BatchPlan(ESPGroup((instance_id,)), tuple(queries), tuple(writes), num_steps)


def pool_tokens(num_requests: int, num_instances: int) -> int:
    """Return the KV room of each instance: half of the requests fit."""
    return num_requests // 2 * MEAN_TOKENS // num_instances


async def measure(
    policy: Policy, num_requests: int, num_instances: int, max_events: int
) -> dict[str, list[float]]:
    """Return the seconds of each part of each event that counts."""
    room = pool_tokens(num_requests, num_instances)
    instances = (ElasticInstance(i, 1, InstanceKind.FULL, kv_capacity=room) for i in range(num_instances))
    cost_model = WorkCostModel()
    executor = SimulatedExecutor(cost_model, crowd(num_requests))
    state = ClusterState(tuple(instances))
    spent: dict[str, list[float]] = {part: [] for part in PARTS}
    while events := await executor.next_events():
        apply_time = 0.0
        for event in events:
            applied, seconds = timed(state.apply, event)
            apply_time += seconds
            executor.submit(applied.instructions)
        if all(isinstance(event, TokensProduced) for event in events):
            continue  # steps of leases
        snapshot, snapshot_time = timed(state.snapshot, executor.now)
        plan, policy_time = timed(policy, snapshot, cost_model)
        instructions, commit_time = timed(state.commit, plan, snapshot)
        executor.submit(instructions)
        if is_counted(snapshot, num_requests):
            parts = (apply_time, snapshot_time, policy_time, commit_time)
            for part, seconds in zip(PARTS, parts, strict=True):
                spent[part].append(seconds)
            if len(spent["apply"]) == max_events:
                break
    return spent


def is_counted(snapshot: Snapshot, num_requests: int) -> bool:
    """Return whether at least a quarter of the requests runs, and a quarter waits."""
    return min(len(snapshot.running), len(snapshot.waiting)) >= num_requests // 4


class Burst(TypedDict):
    """CPU seconds of the loop a request of a burst, until all have arrived, and until all have ended."""

    num_requests: int
    seconds_to_come: float
    seconds: float
    num_plans: int


async def serve_burst(policy: Policy, num_requests: int) -> Burst:
    """Return the cost of a burst for the loop."""
    room, num_plans = pool_tokens(num_requests, NUM_BURST_INSTANCES), 0
    instances = tuple(ElasticInstance(i, 1, InstanceKind.FULL, room) for i in range(NUM_BURST_INSTANCES))

    def counted(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        nonlocal num_plans
        num_plans += 1
        return policy(snapshot, cost_model)

    cost_model = WorkCostModel()
    executor = SimulatedExecutor(cost_model, crowd(num_requests))
    start, seconds_to_come = process_time(), 0.0
    async for event in Scheduling(ClusterState(instances), counted, cost_model, executor).events():
        if not seconds_to_come and not isinstance(event, RequestArrived):
            seconds_to_come = (process_time() - start) / num_requests
    return {
        "num_requests": num_requests,
        "seconds_to_come": seconds_to_come,
        "seconds": (process_time() - start) / num_requests,
        "num_plans": num_plans,
    }


def timed(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """Return the result of a call, and its seconds of a processor."""
    start = thread_time()
    result = work(*args, **kwargs)
    return result, thread_time() - start


def growth(rows: Sequence[Row], row: Row) -> str:
    """Return the factor of time over that of requests since the row above, if that has as many instances."""
    if not rows or rows[-1]["num_instances"] != row["num_instances"]:
        return ""
    above = rows[-1]
    time_factor = row["seconds"][IDLE_SECONDS][0] / above["seconds"][IDLE_SECONDS][0]
    return f"{time_factor * above['num_requests'] / row['num_requests']:.2f}"


def main() -> None:
    parser = script_parser("event", __doc__)
    parser.add_argument("--policy", default="esp", help="policy to measure (%(default)s)")
    parser.add_argument(
        "--num-requests",
        type=int,
        nargs="+",
        default=[32, 128, 512],
        help="numbers of requests to measure (%(default)s)",
    )
    parser.add_argument(
        "--num-instances",
        type=int,
        nargs="+",
        default=[8],
        help="numbers of instances to measure (%(default)s)",
    )
    parser.add_argument(
        "--max-events", type=int, default=400, help="number of events to count, at most (%(default)s)"
    )
    parser.add_argument("--bursts", type=int, nargs="*", default=[], help="sizes of bursts to measure (none)")
    args = parser.parse_args()
    policy = refill if args.policy == "refill" else make_policy(args.policy, PolicyConfig())
    gc.collect()
    gc.freeze()  # this and the next as a server does when it is up
    tune_gc()
    print(f"us an event, policy {args.policy}: median (P95)\n")
    columns = "".join(f"{column:>18}" for column in (*PARTS, "all", IDLE_SECONDS))
    print(f"{'instances':>9}{'live':>6}{'events':>8}{'growth':>8}{columns}")
    rows: list[Row] = []
    for num_instances, num_requests in product(args.num_instances, args.num_requests):
        if pool_tokens(num_requests, num_instances) < MAX_TOKENS:
            continue
        spent = asyncio.run(measure(policy, num_requests, num_instances, args.max_events))
        gc.collect()
        spent["all"] = [sum(parts) for parts in zip(*spent.values(), strict=True)]
        spent[IDLE_SECONDS] = [a - p for a, p in zip(spent["all"], spent["policy"], strict=True)]
        cells = {part: (median(values), quantiles(values, n=20)[-1]) for part, values in spent.items()}
        row = Row(num_requests=num_requests, num_instances=num_instances, seconds=cells)
        shown = "".join(f"{f'{1e6 * mid:.0f} ({1e6 * high:.0f})':>18}" for mid, high in cells.values())
        print(f"{num_instances:>9}{num_requests:>6}{len(spent['all']):>8}{growth(rows, row):>8}{shown}")
        rows.append(row)
    bursts = []
    for num_requests in args.bursts:
        burst = asyncio.run(serve_burst(policy, num_requests))
        both = (f"{1e6 * burst[name]:,.0f} us" for name in ("seconds_to_come", "seconds"))
        print(f"a burst of {num_requests:,}: {' and '.join(both)} a request, {burst['num_plans']:,} plans")
        bursts.append(burst)
    numbers = {"policy": args.policy, "ceiling": CEILING, "rows": rows, "bursts": bursts}
    print_result("event", numbers, save=args.save)


if __name__ == "__main__":
    main()
