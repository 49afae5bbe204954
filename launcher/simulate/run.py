"""One policy under one load in virtual time, by the loop that serves real clusters."""

import asyncio
from array import array
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from math import inf

from loong.core.cluster_state import ClusterState
from loong.core.request import SLO, Request, RequestId, SamplingParams
from loong.core.snapshot import ClusterStats
from loong.executor.processors import Processors
from loong.executor.simulated import SimulatedExecutor
from loong.launcher.simulate.cluster import SimulatedCluster
from loong.launcher.simulate.config import Host
from loong.launcher.simulate.watch import TokenTimes, Watch
from loong.scheduler.policy import Policy
from loong.scheduling import Observer, Scheduling
from loong.workloads.record import RequestRecord, Usage
from loong.workloads.request import WorkloadRequest
from loong.workloads.slo import LimitsOf

REFUSED = "needs more KV than the policy gives one request"
CUT_OFF = "the run was cut off: too many had missed already"


@dataclass(slots=True)
class SimulatedRun:
    """What became of every request sent, by virtual time. `is_cut_off`: more missed than were allowed to."""

    records: list[RequestRecord]
    stats: ClusterStats
    num_events: int
    is_cut_off: bool


def simulate(
    policy: Policy,
    cluster: SimulatedCluster,
    load: Sequence[WorkloadRequest],
    limits_of: LimitsOf,
    *,
    host: Host | None = None,
    observers: Sequence[Observer] = (),
    max_misses: float = inf,
) -> SimulatedRun:
    """Send `load` to an empty cluster, and run until all has ended, or more than `max_misses` came too late.

    Requests bring their limits as their SLO. Those that need more KV than the policy could ever give are
    refused, as a server would.
    """
    state = ClusterState(cluster.instances)
    host = host or Host()
    processors = Processors(host.num_cores, cluster.instances[0].tp_size)
    admitted = {number: sent for number, sent in enumerate(load) if _is_admissible(sent, cluster)}
    arrivals = (_request(number, sent, limits_of) for number, sent in admitted.items())
    executor = SimulatedExecutor(
        cluster.cost_model, arrivals, processors=processors, plan_time=host.plan_time
    )
    scheduling = Scheduling(state, policy, cluster.cost_model, executor, observers)
    watch = Watch(max_misses - (len(load) - len(admitted)))
    asyncio.run(_drain(scheduling, watch))
    records = []
    for number, sent in enumerate(load):
        times = watch.token_times.get(_request_id(number), array("d"))
        has_ended = len(times) == sent.num_output_tokens
        error = None if has_ended else CUT_OFF if number in admitted else REFUSED
        records.append(_record(sent, times, error))
    return SimulatedRun(records, state.snapshot(executor.now).stats, watch.num_events, watch.is_hopeless)


async def _drain(scheduling: Scheduling, watch: Watch) -> None:
    """Run to the end, or until that is clear."""
    async with aclosing(scheduling.events()) as events:
        async for event in events:
            watch.take(event)
            if watch.is_hopeless:
                return


def _is_admissible(sent: WorkloadRequest, cluster: SimulatedCluster) -> bool:
    """Whether its KV can ever fit; the last output token needs none."""
    return sent.num_prompt_tokens + sent.num_output_tokens - 1 <= cluster.max_request_tokens


def _request(number: int, sent: WorkloadRequest, limits_of: LimitsOf) -> Request:
    limits = limits_of(sent.num_prompt_tokens)
    return Request(
        _request_id(number),
        range(sent.num_prompt_tokens),
        SamplingParams(max_tokens=sent.num_output_tokens),
        sent.arrival_time,
        SLO(limits.ttft, limits.tpot),
    )


def _record(sent: WorkloadRequest, times: TokenTimes, error: str | None) -> RequestRecord:
    return RequestRecord(
        request=sent,
        due_time=sent.arrival_time,
        sent_time=sent.arrival_time,
        token_times=times,
        finish_time=times[-1] if times else sent.arrival_time,
        usage=Usage(sent.num_prompt_tokens, len(times)),
        error=error,
    )


def _request_id(number: int) -> RequestId:
    return f"r{number:06}"
