"""Real workers and their load, for benchmarks that compare predictions with measurements."""

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from math import inf
from pathlib import Path

from loong.core.errors import ClusterError
from loong.core.events import Event, InstanceLost, RequestAborted, RequestArrived
from loong.core.request import Request
from loong.engine.loop import Scheduling
from loong.executor.workers import WorkersExecutor
from loong.hardware.chosen_cost_model import chosen_cost_model
from loong.hardware.model_shape import shape_of
from loong.launcher.cluster.config import ClusterConfig
from loong.launcher.cluster_flags import add_instance_flags, add_model_flags, chosen_cluster
from loong.launcher.flags import ratio
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.policy import policy_kind
from loong.workloads.request import WorkloadRequest
from loong.workloads.workload import make_workload


def add_worker_flags(parser: ArgumentParser) -> None:
    """Add the flags of workers and their cost model."""
    add_model_flags(parser.add_argument_group("model"))
    add_instance_flags(parser.add_argument_group("cluster"))
    parser.add_argument(
        "--cost-model", type=Path, help="cost model of `loong profile` (the device's roofline)"
    )


def add_run_flags(parser: ArgumentParser, *, request_rate: float, num_requests: int) -> None:
    """Add the flags of workers, cost model, policy and load."""
    add_worker_flags(parser)
    parser.add_argument("--policy", default="esp", help="policy to run (%(default)s)")
    parser.add_argument("--workload", default="mixed", help="workload to send (%(default)s)")
    parser.add_argument(
        "--length-scale", type=ratio, default=1 / 64, help="factor that multiplies lengths (%(default)s)"
    )
    parser.add_argument(
        "--request-rate",
        type=ratio,
        nargs="+",
        default=[request_rate],
        help="requests per second (%(default)s)",
    )
    parser.add_argument(
        "--num-requests", type=int, default=num_requests, help="number of requests of each run (%(default)s)"
    )
    parser.add_argument(
        "--workload-seed", type=int, nargs="+", default=[1], help="seeds of the requests (%(default)s)"
    )


def chosen_workers(args: Namespace, policy: str | None = None) -> tuple[ClusterConfig, WorkCostModel]:
    """Return the workers that the flags name, and their cost model.

    A policy of one instance gets one, with a roofline, since a measured cost model is of other workers.
    """
    chosen, path = chosen_cluster(args, start_timeout=600.0), args.cost_model
    if policy is not None and policy_kind(policy).max_instances == 1 < args.num_instances:
        whole = vars(args) | {
            "num_instances": 1,
            "tensor_parallel_size": args.num_instances * args.tensor_parallel_size,
        }
        if args.device == "cpu":
            whole["kv_cache_tokens"] = args.num_instances * chosen.cluster.kv_capacity
        chosen, path = chosen_cluster(Namespace(**whole), start_timeout=600.0), None
    model = chosen_cost_model(
        path,
        shape_of(chosen.model),
        chosen.device,
        num_instances=chosen.cluster.num_instances,
        tp_size=chosen.cluster.tp_size,
        greatest={},
    )
    return replace(chosen.cluster, graph_limits=model.graph_limits), model


def chosen_load(args: Namespace, request_rate: float, seed: int) -> Sequence[WorkloadRequest]:
    """Return the requests that the flags name, of one rate and seed."""
    return make_workload(
        args.workload,
        args.num_requests,
        seed=seed,
        request_rate=request_rate,
        length_scale=args.length_scale,
    )


async def served(
    scheduling: Scheduling,
    executor: WorkersExecutor,
    requests: Sequence[Request],
    patience: float = inf,
) -> AsyncIterator[Event]:
    """Send each request at its time from now on, and yield events until all have ended.

    Requests that have not ended `patience` seconds after the last was sent are aborted. Raises `ClusterError`
    if an instance is lost.
    """
    start, num_before = executor.now, scheduling.state.snapshot(executor.now).stats.num_ended

    async def send() -> None:
        for request in requests:
            await asyncio.sleep(start + request.arrival_time - executor.now)
            now = executor.now
            executor.post(RequestArrived(now, replace(request, arrival_time=now)))
        if patience < inf:
            await asyncio.sleep(patience)
            for request in requests:
                executor.post(RequestAborted(executor.now, request.request_id))  # nothing if it has ended

    sending = asyncio.create_task(send())
    try:
        async with aclosing(scheduling.events()) as events:
            async for event in events:
                yield event
                if isinstance(event, InstanceLost):
                    raise ClusterError(f"instance {event.instance_id} was lost: {event.reason}")
                snapshot = scheduling.state.snapshot(event.time)
                is_idle = not (snapshot.batches or snapshot.ending or snapshot.migrations)
                if is_idle and snapshot.stats.num_ended - num_before == len(requests):
                    return
    finally:
        sending.cancel()
