"""Real workers and what is sent to them, as benchmarks choose it that hold predictions to what happened."""

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

from loong.core.events import Drained, Event, RequestArrived
from loong.core.request import Request
from loong.executor.workers import WorkersExecutor
from loong.launcher.chosen_cost_model import chosen_cost_model
from loong.launcher.cluster_flags import add_instance_flags, add_model_flags, chosen_cluster
from loong.launcher.flags import ratio
from loong.launcher.local import ClusterConfig
from loong.launcher.model_shape import shape_of
from loong.scheduler.cost_model import WorkCostModel
from loong.scheduling import Scheduling
from loong.workloads.request import WorkloadRequest
from loong.workloads.workload import make_workload


def add_worker_flags(parser: ArgumentParser) -> None:
    """The flags of workers and their cost model."""
    add_model_flags(parser.add_argument_group("model"))
    add_instance_flags(parser.add_argument_group("cluster"))
    parser.add_argument("--cost-model", type=Path, help="from `loong profile` (the device's roofline)")


def add_run_flags(parser: ArgumentParser, *, request_rate: float, num_requests: int) -> None:
    """The flags of workers, cost model, policy and load."""
    add_worker_flags(parser)
    parser.add_argument("--policy", default="esp")
    parser.add_argument("--workload", default="mixed")
    parser.add_argument("--length-scale", type=ratio, default=1 / 64)
    parser.add_argument("--request-rate", type=ratio, nargs="+", default=[request_rate])
    parser.add_argument("--num-requests", type=int, default=num_requests)
    parser.add_argument("--workload-seed", type=int, nargs="+", default=[1])


def chosen_workers(args: Namespace) -> tuple[ClusterConfig, WorkCostModel]:
    """The workers that the flags name, and what predicts their times."""
    chosen = chosen_cluster(args, start_timeout=600.0)
    model = chosen_cost_model(
        args.cost_model,
        shape_of(chosen.model),
        chosen.device,
        num_instances=chosen.cluster.num_instances,
        tp_size=chosen.cluster.tp_size,
        greatest={},
    )
    return chosen.cluster, model


def chosen_load(args: Namespace, request_rate: float, seed: int) -> Sequence[WorkloadRequest]:
    """The requests that the flags name, of one rate and seed."""
    return make_workload(
        args.workload,
        args.num_requests,
        seed=seed,
        request_rate=request_rate,
        length_scale=args.length_scale,
    )


async def served(
    scheduling: Scheduling, executor: WorkersExecutor, requests: Sequence[Request]
) -> AsyncIterator[Event]:
    """Send each request at its time from now on, and yield what happens until all have ended."""
    start = executor.now

    async def arrive() -> None:
        for request in requests:
            await asyncio.sleep(start + request.arrival_time - executor.now)
            now = executor.now
            executor.post(RequestArrived(now, replace(request, arrival_time=now)))

    arrivals = asyncio.create_task(arrive())
    async for event in scheduling.events():
        yield event
        if scheduling.state.snapshot(event.time).stats.num_ended == len(requests):
            executor.post(Drained())
    await arrivals
