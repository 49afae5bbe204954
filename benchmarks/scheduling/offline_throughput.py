"""Measures the simulated throughput of prompts that are all there at the start, with targets and without.

Ceiling: the time in which the KV pool, always full of decodes, is read once a step. Output tokens a second of
one instance, in virtual time by the roofline of the device, or by a cost model of `loong profile`.
"""

import asyncio
import sys
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.core.events import TokensProduced
from loong.core.request import Request, SamplingParams
from loong.core.snapshot import ClusterStats
from loong.engine.loop import Scheduling
from loong.executor.lookahead import LookaheadMargin
from loong.executor.simulated import SimulatedExecutor
from loong.hardware.model_shape import shape_of
from loong.model.shapes import SHAPES
from loong.processes.gc_tuning import tune_gc
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy
from loong.simulation.cluster import Hardware, SimulatedCluster
from loong.state.cluster_state import ClusterState

CONFIGS = {
    "usual targets": PolicyConfig(),
    "no targets": PolicyConfig(target_ttft=inf, target_tpot=inf),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One run, in virtual seconds."""

    targets: str
    seconds: float
    tokens_per_second: float
    most_decodes: int
    num_batches: int


def requests_of(num_requests: int, num_prompt: int, num_output: int) -> list[Request]:
    params = SamplingParams(max_tokens=num_output)
    return [
        Request(f"r{n:05}", range(n, n + num_prompt), params, arrival_time=0.0) for n in range(num_requests)
    ]


async def run(cluster: SimulatedCluster, policy: str, targets: str, requests: list[Request]) -> Row:
    model = cluster.cost_model
    executor = SimulatedExecutor(model, requests, (), lookahead=LookaheadMargin.on(model.host))
    state = ClusterState(cluster.instances)
    scheduling = Scheduling(state, make_policy(policy, CONFIGS[targets]), model, executor)
    num_tokens = most = 0
    async for event in scheduling.events():
        if isinstance(event, TokensProduced):
            num_tokens += len(event.tokens)
            most = max(most, len(event.tokens))
    stats: ClusterStats = state.snapshot(executor.now).stats
    return Row(targets, executor.now, num_tokens / executor.now, most, sum(stats.num_batches_by_dop.values()))


def main() -> None:
    parser = script_parser("offline_throughput", __doc__)
    parser.add_argument("--num-requests", type=int, default=512)
    parser.add_argument("--lengths", type=int, nargs=2, default=(1000, 1000), metavar=("INPUT", "OUTPUT"))
    parser.add_argument("--model", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--num-instances", type=int, default=1)
    parser.add_argument("--policy", default="esp")
    args = parser.parse_args()
    tune_gc()
    hardware = Hardware(shape_of(SHAPES[args.model]), args.device, args.num_instances)
    cluster = hardware.cluster(args.policy)
    print(f"{args.num_requests} requests of {args.lengths[0]} + {args.lengths[1]}, KV for ", end="")
    print(f"{sum(i.kv_capacity for i in cluster.instances):,} tokens\n")
    rows = []
    for targets in CONFIGS:
        row = asyncio.run(run(cluster, args.policy, targets, requests_of(args.num_requests, *args.lengths)))
        print(
            f"{targets:>14}: {row.seconds:7.1f} s, {row.tokens_per_second:7.0f} output tokens/s, up to "
            f"{row.most_decodes} decodes a step, {row.num_batches} batches",
            flush=True,
        )
        rows.append(asdict(row))
    given = {"num_requests": args.num_requests, "lengths": list(args.lengths), "model": args.model}
    numbers = {**given, "device": args.device, "num_instances": args.num_instances, "policy": args.policy}
    print_result("offline_throughput", {**numbers, "rows": rows}, save=args.save)


if __name__ == "__main__":
    main()
