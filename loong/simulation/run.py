"""One policy under one load in virtual time, by the loop that serves real clusters."""

import asyncio
from array import array
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from loong.core.observer import Observer
from loong.core.request import RequestId
from loong.core.snapshot import ClusterStats
from loong.engine.loop import Scheduling
from loong.engine.prefix_hits import PrefixHits
from loong.engine.refusals import Refusals
from loong.executor.lookahead import LookaheadMargin
from loong.executor.processors import Processors
from loong.executor.simulated import SimulatedExecutor
from loong.scheduler.policy import Policy
from loong.simulation.arrivals import Arrivals, is_admissible, request_id_of
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
    keeps_prefixes: bool = True,
    relays: bool = True,
    refusals: Refusals | None = None,
) -> SimulatedRun:
    """Send `load` to an empty cluster, and run until all requests end or `misses` allow no more.

    Given `work_of`, a backlog that has grown when all have arrived also ends the run. Requests bring their
    limits as their SLO. Those that need more KV than the policy could ever give are refused, as a server
    would. The requests after the measured ones are sent until each measured one has ended or missed. So the
    load stays high while a backlog is worked off. Without `refusals`, a plan that breaks a rule raises
    `InvalidPlanError`.
    """
    state = _empty(cluster, keeps_prefixes=keeps_prefixes, relays=relays)
    host, misses = host or Host(), misses or Misses()
    numbered = {request_id_of(number): sent for number, sent in enumerate(load.measured)}
    admitted = _admitted(numbered, load, cluster, misses)
    works = None if work_of is None else {name: work_of(sent) for name, sent in admitted.items()}
    watch = Watch(misses, admitted, works)
    arrivals = Arrivals(load, cluster, limits_of, lambda: watch.is_decided)
    executor = SimulatedExecutor(
        cluster.cost_model,
        arrivals,
        processors=Processors(host.num_cores, cluster.instances[0].tp_size),
        plan_time=host.plan_time,
        noise=host.noise,
        lookahead=LookaheadMargin.on(cluster.cost_model.host),
        output_lengths=arrivals.output_lengths,
    )
    cached: Counter[RequestId] = Counter()
    hits = PrefixHits(lambda found: cached.update({found.request_id: found.num_tokens}))
    scheduling = Scheduling(state, policy, cluster.cost_model, executor, (*observers, hits), refusals)
    asyncio.run(_drain(scheduling, watch, arrivals, executor))
    records = [
        _record(name, sent, watch, admitted, executor.now, cached[name]) for name, sent in numbered.items()
    ]
    return SimulatedRun(
        records, state.snapshot(executor.now).stats, watch.num_events, watch.is_hopeless, executor.now
    )


def _empty(cluster: SimulatedCluster, *, keeps_prefixes: bool, relays: bool) -> ClusterState:
    """Return the state of a cluster without requests."""
    least_saved = cluster.cost_model.least_saved if relays else None
    return ClusterState(
        cluster.instances, keeps_prefixes=keeps_prefixes, least_saved=least_saved, windows=cluster.windows
    )


def _admitted(
    numbered: Mapping[RequestId, WorkloadRequest], load: Load, cluster: SimulatedCluster, misses: Misses
) -> dict[RequestId, WorkloadRequest]:
    """Return the requests that are not refused; those that are count as `misses`."""
    admitted: dict[RequestId, WorkloadRequest] = {}
    for request_id, sent in numbered.items():
        if is_admissible(sent, cluster, load.declared_tokens):
            admitted[request_id] = sent
        else:
            misses.add(sent.num_prompt_tokens)
    return admitted


def _record(
    request_id: RequestId,
    sent: WorkloadRequest,
    watch: Watch,
    admitted: Container[RequestId],
    end: float,
    num_cached_tokens: int,
) -> RequestRecord:
    """Return the record of a request in a run that ended at `end`."""
    times = watch.token_times.get(request_id, array("d"))
    has_ended = len(times) == sent.num_output_tokens
    error = None if has_ended else CUT_OFF if request_id in admitted else REFUSED
    due_time = max(sent.arrival_time, end) if sent.shape.is_follower else sent.arrival_time
    arrival_time = watch.arrival_time(request_id, due_time)
    return record_of(request_id, sent, arrival_time, times, error, num_cached_tokens)


async def _drain(
    scheduling: Scheduling, watch: Watch, arrivals: Arrivals, executor: SimulatedExecutor
) -> None:
    """Run to the end, or until the outcome is clear."""
    async with aclosing(scheduling.events()) as events:
        async for event in events:
            watch.take(event)
            if watch.is_hopeless:
                return
            for request in arrivals.released(event):
                executor.add_arrival(request)


def record_of(
    request_id: RequestId,
    sent: WorkloadRequest,
    arrival_time: float,
    times: Sequence[float],
    error: str | None,
    num_cached_tokens: int = 0,
) -> RequestRecord:
    """Return the record that a client would have made."""
    return RequestRecord(
        request=sent,
        due_time=arrival_time,
        sent_time=arrival_time,
        token_times=times,
        finish_time=times[-1] if times else arrival_time,
        usage=TokenUsage(sent.num_prompt_tokens, len(times), num_cached_tokens),
        error=error,
        request_id=request_id,
    )
