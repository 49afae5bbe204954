"""What one event costs the engine: apply, snapshot, policy, check and commit, by the number of requests.

A crowd of requests arrives at once in the simulator, with KV room for half of them; every event that calls
the policy while the crowd is there counts. Ceiling at 64 running and 64 waiting on 8 instances: 0.5 ms.
"""

import argparse
import asyncio
from collections.abc import Callable
from os import getloadavg
from statistics import median, quantiles
from time import perf_counter
from typing import ParamSpec, TypeVar

from result import print_result

from loong.core.cluster_state import ClusterState
from loong.core.events import Drained, TokensProduced
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.request import Request, SamplingParams
from loong.executor.simulated import SimulatedExecutor
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost_model import WorkCostModel
from loong.scheduler.policy import make_policy

CEILING = 0.5e-3
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 120
PARTS = ("apply", "snapshot", "policy", "check and commit")

P = ParamSpec("P")
T = TypeVar("T")


async def measure(policy_name: str, num_requests: int, num_instances: int) -> dict[str, list[float]]:
    """Seconds of each part of each event, while at least a quarter of the crowd runs and a quarter waits."""
    capacity = num_requests // 2 * (PROMPT_TOKENS + OUTPUT_TOKENS) // num_instances
    instances = tuple(
        ElasticInstance(i, 1, InstanceKind.FULL, kv_capacity=capacity) for i in range(num_instances)
    )
    params = SamplingParams(max_tokens=OUTPUT_TOKENS)
    prompt = tuple(range(PROMPT_TOKENS))
    cost_model = WorkCostModel()
    executor = SimulatedExecutor(
        cost_model, [Request(f"r{i}", prompt, params, arrival_time=0.0) for i in range(num_requests)]
    )
    state, policy = ClusterState(instances), make_policy(policy_name, PolicyConfig())
    spent: dict[str, list[float]] = {part: [] for part in PARTS}
    while not isinstance(event := await executor.next_event(), Drained):
        instructions, seconds = timed(state.apply, event)
        executor.submit(instructions)
        if isinstance(event, TokensProduced):
            continue
        parts = [seconds]
        snapshot, seconds = timed(state.snapshot, event.time)
        parts.append(seconds)
        plan, seconds = timed(policy, snapshot, cost_model)
        parts.append(seconds)
        instructions, seconds = timed(state.commit, plan, snapshot)
        parts.append(seconds)
        executor.submit(instructions)
        if min(len(snapshot.running), len(snapshot.waiting)) >= num_requests // 4:
            for part, value in zip(PARTS, parts, strict=True):
                spent[part].append(value)
    return spent


def timed(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """What a call returns, and the seconds it took."""
    start = perf_counter()
    result = work(*args, **kwargs)
    return result, perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="esp")
    parser.add_argument("--num-requests", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--num-instances", type=int, default=8)
    parser.add_argument("--save", action="store_true", help="append the result to results/event.jsonl")
    args = parser.parse_args()
    load = getloadavg()[0]
    print(f"us an event, policy {args.policy}, {args.num_instances} instances: median (P95)\n")
    print(f"{'live':>6}{'events':>8}" + "".join(f"{part:>22}" for part in (*PARTS, "all")))
    rows = []
    for num_requests in args.num_requests:
        spent = asyncio.run(measure(args.policy, num_requests, args.num_instances))
        spent["all"] = [sum(parts) for parts in zip(*spent.values(), strict=True)]
        cells = {part: (median(values), quantiles(values, n=20)[-1]) for part, values in spent.items()}
        shown = (f"{1e6 * mid:.0f} ({1e6 * high:.0f})" for mid, high in cells.values())
        print(f"{num_requests:>6}{len(spent['all']):>8}" + "".join(f"{cell:>22}" for cell in shown))
        rows.append({"num_requests": num_requests, "seconds": cells})
    numbers = {"policy": args.policy, "num_instances": args.num_instances, "ceiling": CEILING, "rows": rows}
    print_result("event", load, numbers, save=args.save)


if __name__ == "__main__":
    main()
