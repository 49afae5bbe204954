"""The simulator against CPU workers: the same requests, policy and cost model, once in real and once in
virtual time.

Workers run in processes of their own, the engine in this one, without HTTP between. The simulator shares the
host's cores among instances, and starts what an event leads to after the time that planning took in the real
run. Ceilings: mean TTFT and TPOT within 15 %, attainment within 5 points.

    loong profile --num-instances 2 --output profile.json
    python benchmarks/reality.py --num-instances 2 --cost-model profile.json
    python benchmarks/reality.py --num-instances 2 --cost-model profile.json --request-rate 4 8 16 \\
        --output-dir out                                               # a curve of each
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

from line_picture import Panel, write_lines
from real_run import add_run_flags, chosen_load, chosen_workers, served
from result import print_result, script_parser

from loong.core.cluster_state import ClusterState
from loong.core.cost_model import CostModel
from loong.core.plan import IterationPlan
from loong.core.request import Request
from loong.core.snapshot import Snapshot
from loong.executor.workers import WorkersExecutor
from loong.launcher.local import ClusterConfig, local_workers
from loong.launcher.simulate.cluster import SimulatedCluster
from loong.launcher.simulate.config import Host, Load
from loong.launcher.simulate.run import record_of, request_id_of, request_of, simulate
from loong.launcher.simulate.watch import Watch
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import Policy, admissible_tokens, make_policy
from loong.scheduling import Scheduling
from loong.workloads.metrics import compute_metrics
from loong.workloads.record import RequestRecord
from loong.workloads.report import table
from loong.workloads.request import SMALLEST_VOCABULARY, WorkloadRequest
from loong.workloads.slo import LimitsOf, parse_slo

CEILING, CEILING_POINTS = 0.15, 0.05
NUM_WARM_UP = 20  # requests before those that count
TIMES = ("mean_ttft", "mean_tpot")

Numbers: TypeAlias = dict[str, float]


@dataclass(slots=True)
class Planning:
    """A policy, and how long after each event its plans were ready."""

    policy: Policy
    executor: WorkersExecutor
    seconds: list[float]

    def plan(self, snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        """What the policy plans."""
        plan = self.policy(snapshot, cost_model)
        if plan.batches:
            self.seconds.append(self.executor.now - snapshot.now)
        return plan


async def serve(
    config: ClusterConfig,
    model: CostModel,
    policy: Policy,
    load: Sequence[WorkloadRequest],
    limits_of: LimitsOf,
) -> tuple[list[RequestRecord], float]:
    """Serve a load by real workers; what became of it, and the mean time of planning."""
    watch = Watch(inf, [request_id_of(number) for number in range(len(load))])
    state = ClusterState(config.instances)
    requests = [real_request_of(number, sent, limits_of) for number, sent in enumerate(load)]
    async with local_workers(config) as executor:
        planning = Planning(policy, executor, [])
        start = executor.now
        async for event in served(Scheduling(state, planning.plan, model, executor), executor, requests):
            watch.take(event)
    records = []
    for number, sent in enumerate(load):
        due = replace(sent, arrival_time=sent.arrival_time + start)
        records.append(record_of(due, watch.token_times[request_id_of(number)], None))
    return records, fmean(planning.seconds)


def real_request_of(number: int, sent: WorkloadRequest, limits_of: LimitsOf) -> Request:
    """What the simulator is sent, with tokens."""
    request = request_of(number, sent, limits_of)
    tokens = tuple(sent.prompt_token_ids(SMALLEST_VOCABULARY))
    params = replace(request.sampling_params, temperature=0.0)
    return replace(request, prompt_token_ids=tokens, sampling_params=params)


def summary(records: Sequence[RequestRecord], limits_of: LimitsOf) -> Numbers:
    """The numbers of all but the first requests; times in seconds."""
    metrics = compute_metrics(records[NUM_WARM_UP:], limits_of)
    ttft, tpot = metrics.latencies.ttft, metrics.latencies.tpot
    assert ttft is not None
    assert tpot is not None
    assert metrics.attainment is not None
    return {"mean_ttft": ttft["mean"], "mean_tpot": tpot["mean"], "attainment": metrics.attainment}


def row_of(rate: float, seed: int, real: Numbers, virtual: Numbers) -> list[tuple[str, ...]]:
    """Real, simulated and the difference, for the table."""
    rows = [
        (
            f"{rate:g}",
            f"{seed}",
            what,
            *(f"{1e3 * numbers[key]:.2f}" for key in TIMES),
            f"{numbers['attainment']:.1%}",
        )
        for what, numbers in (("real", real), ("simulated", virtual))
    ]
    points = 100 * (virtual["attainment"] - real["attainment"])
    differences = (f"{virtual[key] / real[key] - 1:+.1%}" for key in TIMES)
    return [*rows, (f"{rate:g}", f"{seed}", "difference", *differences, f"{points:+.1f} points")]


def panel(policy: str, slo: str, found: Mapping[float, Sequence[tuple[Numbers, Numbers]]]) -> Panel:
    """Attainment over rate, real and simulated over each other; the means of the seeds."""
    lines = {
        name: [
            (rate, 100 * fmean(pair[side]["attainment"] for pair in pairs)) for rate, pairs in found.items()
        ]
        for side, name in enumerate((policy, f"{policy}, simulated"))
    }
    return Panel(f"SLO {slo}", "requests per second", "SLO attainment (%)", lines, level=90.0)


def main() -> None:
    parser = script_parser("reality", __doc__)
    add_run_flags(parser, request_rate=4.0, num_requests=200)
    parser.add_argument("--slo", default="ttft:100 tpot:20")
    parser.add_argument("--output-dir", type=Path, help="for the picture (none is drawn)")
    args = parser.parse_args()
    config, model = chosen_workers(args)
    policy = make_policy(args.policy, PolicyConfig())
    limits_of = parse_slo(args.slo).limits_of(None)
    rows: list[tuple[str, ...]] = []
    results: list[dict[str, object]] = []
    found: dict[float, list[tuple[Numbers, Numbers]]] = {rate: [] for rate in args.request_rate}
    for rate, seed in product(args.request_rate, args.workload_seed):
        load = chosen_load(args, rate, seed)
        records, planning = asyncio.run(serve(config, model, policy, load, limits_of))
        cluster = SimulatedCluster(config.instances, model, admissible_tokens(args.policy, config.instances))
        host = Host(num_cores=len(os.sched_getaffinity(0)), plan_time=planning)
        run = simulate(policy, cluster, Load(load), limits_of, host=host)
        real, virtual = summary(records, limits_of), summary(run.records, limits_of)
        results.append(
            {"rate": rate, "seed": seed, "plan_time": planning, "real": real, "simulated": virtual}
        )
        found[rate].append((real, virtual))
        rows += row_of(rate, seed, real, virtual)
    print(table(("req/s", "seed", "", "mean TTFT ms", "mean TPOT ms", "attainment"), rows))
    if args.output_dir is not None:
        write_lines([panel(args.policy, args.slo, found)], args.output_dir, "reality")
    print_result(
        "reality",
        {
            "policy": args.policy,
            "workload": args.workload,
            "length_scale": args.length_scale,
            "num_requests": args.num_requests,
            "num_instances": config.num_instances,
            "slo": args.slo,
            "ceilings": [CEILING, CEILING_POINTS],
            "rows": results,
        },
        save=args.save,
    )


if __name__ == "__main__":
    main()
