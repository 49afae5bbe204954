"""One policy under one load in virtual time, by the loop that serves real clusters."""

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain, takewhile

from loong.core.observer import Observer
from loong.core.request import SLO, Request, RequestId, SamplingParams
from loong.core.snapshot import ClusterStats
from loong.engine.loop import Scheduling
from loong.executor.lookahead import LookaheadMargin
from loong.executor.processors import Processors
from loong.executor.simulated import SimulatedExecutor
from loong.scheduler.policy import Policy
from loong.simulation.cluster import SimulatedCluster
from loong.simulation.config import Host, Load
from loong.simulation.watch import Watch
from loong.state.cluster_state import ClusterState
from loong.workloads.metrics.backlog import WorkOf
from loong.workloads.metrics.misses import Misses
from loong.workloads.metrics.record import CUT_OFF, RequestRecord, TokenUsage
from loong.workloads.metrics.slo import LimitsOf
from loong.workloads.request import WorkloadRequest

REFUSED = "needs more KV than the policy gives one request"


@dataclass(slots=True)
class SimulatedRun:
    """The outcome of every measured request, in virtual time, until `end`.

    `is_cut_off`: more requests missed than allowed, or the backlog grew.
    """

    records: list[RequestRecord]
    stats: ClusterStats
    num_events: int
    is_cut_off: bool
    end: float


def simulate(
    policy: Policy,
    cluster: SimulatedCluster,
    load: Load,
    limits_of: LimitsOf,
    *,
    host: Host | None = None,
    observers: Sequence[Observer] = (),
    misses: Misses | None = None,
    work_of: WorkOf | None = None,
) -> SimulatedRun:
    """Send `load` to an empty cluster, and run until all requests end or `misses` allow no more.

    Given `work_of`, a backlog that has grown when all have arrived also ends the run. Requests bring their
    limits as their SLO. Those that need more KV than the policy could ever give are refused, as a server
    would. The requests after the measured ones are sent until each measured one has ended or missed. So the
    load stays high while a backlog is worked off.
    """
    state = ClusterState(cluster.instances)
    host = host or Host()
    numbered = {request_id_of(number): sent for number, sent in enumerate(load.measured)}
    admitted = {request_id: sent for request_id, sent in numbered.items() if is_admissible(sent, cluster)}
    misses = misses or Misses()
    for request_id, sent in numbered.items():
        if request_id not in admitted:
            misses.add(sent.num_prompt_tokens)
    works = None if work_of is None else {name: work_of(sent) for name, sent in admitted.items()}
    watch = Watch(misses, admitted, works)
    executor = SimulatedExecutor(
        cluster.cost_model,
        _arrivals(load, cluster, limits_of, watch),
        processors=Processors(host.num_cores, cluster.instances[0].tp_size),
        plan_time=host.plan_time,
        noise=host.noise,
        lookahead=LookaheadMargin.on(cluster.cost_model.host),
    )
    scheduling = Scheduling(state, policy, cluster.cost_model, executor, observers)
    asyncio.run(_drain(scheduling, watch))
    records = []
    for request_id, sent in numbered.items():
        times = watch.token_times.get(request_id, array("d"))
        has_ended = len(times) == sent.num_output_tokens
        error = None if has_ended else CUT_OFF if request_id in admitted else REFUSED
        records.append(record_of(request_id, sent, times, error))
    return SimulatedRun(
        records, state.snapshot(executor.now).stats, watch.num_events, watch.is_hopeless, executor.now
    )


async def _drain(scheduling: Scheduling, watch: Watch) -> None:
    """Run to the end, or until the outcome is clear."""
    async with aclosing(scheduling.events()) as events:
        async for event in events:
            watch.take(event)
            if watch.is_hopeless:
                return


def _arrivals(load: Load, cluster: SimulatedCluster, limits_of: LimitsOf, watch: Watch) -> Iterator[Request]:
    following = takewhile(lambda _: not watch.is_decided, load.following)
    for number, sent in enumerate(chain(load.measured, following)):
        if is_admissible(sent, cluster):
            yield request_of(number, sent, limits_of)


def is_admissible(sent: WorkloadRequest, cluster: SimulatedCluster) -> bool:
    """Return whether its KV can ever fit; the last output token needs none."""
    return sent.num_prompt_tokens + sent.num_output_tokens - 1 <= cluster.max_request_tokens


def request_of(number: int, sent: WorkloadRequest, limits_of: LimitsOf) -> Request:
    """Return the request of a workload's entry, with its limits as its SLO.

    Only the number of its tokens counts.
    """
    limits = limits_of(sent.num_prompt_tokens)
    return Request(
        request_id_of(number),
        range(sent.num_prompt_tokens),
        SamplingParams(max_tokens=sent.num_output_tokens),
        SLO(limits.ttft, limits.tpot),
        sent.shape.user,
        arrival_time=sent.arrival_time,
    )


def record_of(
    request_id: RequestId, sent: WorkloadRequest, times: Sequence[float], error: str | None
) -> RequestRecord:
    """Return the record that a client would have made."""
    return RequestRecord(
        request=sent,
        due_time=sent.arrival_time,
        sent_time=sent.arrival_time,
        token_times=times,
        finish_time=times[-1] if times else sent.arrival_time,
        usage=TokenUsage(sent.num_prompt_tokens, len(times)),
        error=error,
        request_id=request_id,
    )


def request_id_of(number: int) -> RequestId:
    """Return an id; ids sort in the order of arrival."""
    return f"r{number:06}"
