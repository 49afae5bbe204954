"""Policies one after another on the same workers, which start once, without HTTP.

The engine runs in this process. Between two policies nothing runs and no KV is left, and corrections of the
cost model are reset.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from math import inf, log1p, pi, sqrt
from pathlib import Path
from statistics import fmean

from real_run import served

from loong.core.cluster_history import ClusterHistory
from loong.core.cost.cost_model import CostModel
from loong.core.plan import IterationPlan
from loong.core.request import Request, RequestId
from loong.core.snapshot import Snapshot
from loong.engine.loop import Scheduling
from loong.executor.lookahead import LookaheadMargin
from loong.executor.workers import WorkersExecutor
from loong.launcher.cluster.config import ClusterConfig
from loong.launcher.cluster.start import local_workers
from loong.observability.decision_log.log import decision_log
from loong.observability.timeline import Timeline
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.recalibration import RecalibratedCostModel, Recalibration
from loong.scheduler.policy import Policy, make_policy
from loong.simulation.arrivals import is_admissible, request_id_of, request_of
from loong.simulation.cluster import SimulatedCluster
from loong.simulation.points import counters_of
from loong.simulation.run import REFUSED, record_of
from loong.simulation.watch import Watch
from loong.state.cluster_state import ClusterState
from loong.workloads.metrics.counters import ServerCounters
from loong.workloads.metrics.record import TOO_LATE, RequestRecord
from loong.workloads.metrics.slo import LimitsOf
from loong.workloads.request import SMALLEST_VOCABULARY, WorkloadRequest


@dataclass(frozen=True, slots=True)
class ServedRun:
    """The results of a load, on a clock that is 0 at its beginning; `plan_time` is the mean of planning.

    `noise` is the standard deviation of the logarithm of actual over predicted time, of the last batches.
    """

    records: list[RequestRecord]
    counters: ServerCounters
    history: ClusterHistory
    plan_time: float
    noise: float


@dataclass(slots=True)
class Planning:
    """A policy, and the seconds from each event to its plan."""

    policy: Policy
    executor: WorkersExecutor
    seconds: list[float]

    def plan(self, snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        """Return the policy's plan."""
        plan = self.policy(snapshot, cost_model)
        if plan.batches:
            self.seconds.append(self.executor.now - snapshot.now)
        return plan


class KeptWorkers:
    """Workers that serve one policy and load after another."""

    def __init__(self, config: ClusterConfig, executor: WorkersExecutor) -> None:
        self._executor, self._state = executor, ClusterState(config.instances)
        self._run_numbers = count()

    async def serve(
        self,
        policy: str,
        cluster: SimulatedCluster,
        load: Sequence[WorkloadRequest],
        limits_of: LimitsOf,
        patience: float = inf,
        log: Path | None = None,
    ) -> ServedRun:
        """Serve a load; requests that have not ended `patience` seconds after the last arrival are cut off.

        `log` is the file of the decision log.
        """
        executor, prefix = self._executor, f"{next(self._run_numbers)}-"
        sent = {prefix + request_id_of(number): request for number, request in enumerate(load)}
        requests = [
            _with_tokens(request_of(number, request, limits_of), request, request_id)
            for number, (request_id, request) in enumerate(sent.items())
            if is_admissible(request, cluster)
        ]
        watch = Watch(measured=[request.request_id for request in requests])
        planning = Planning(make_policy(policy, PolicyConfig()), executor, [])
        recalibration, timeline = Recalibration(cluster.cost_model), Timeline()
        cost_model = RecalibratedCostModel(recalibration)
        start, before = executor.now, self._counters
        with decision_log(log) as decisions:
            observers = (timeline, recalibration, decisions)
            scheduling = Scheduling(self._state, planning.plan, cost_model, executor, observers)
            async for event in served(scheduling, executor, requests, patience):
                watch.take(event)
        return ServedRun(
            [_record(request_id, request, watch, start) for request_id, request in sent.items()],
            self._counters.since(before),
            timeline.history().after(start),
            fmean(planning.seconds) if planning.seconds else 0.0,
            _noise(recalibration),
        )

    @property
    def _counters(self) -> ServerCounters:
        return counters_of(self._state.snapshot(self._executor.now).stats)


@asynccontextmanager
async def kept_workers(config: ClusterConfig, lookahead: LookaheadMargin) -> AsyncIterator[KeptWorkers]:
    """Start workers whose ends of batches are predicted by `lookahead`, and end them."""
    async with local_workers(config, lookahead) as executor:
        yield KeptWorkers(config, executor)


def _noise(recalibration: Recalibration) -> float:
    """Estimate the noise from mean errors, as of a normal distribution, which is robust to stalls."""
    errors = recalibration.errors.values()
    return sqrt(pi / 2) * fmean(map(log1p, errors)) if errors else 0.0


def _with_tokens(request: Request, sent: WorkloadRequest, request_id: RequestId) -> Request:
    """Return the request that the simulator is sent, with tokens; turns of sessions have no session."""
    params = replace(request.sampling_params, temperature=0.0)
    alone = replace(sent, shape=sent.shape.alone())
    tokens = tuple(alone.prompt_token_ids(SMALLEST_VOCABULARY))
    return replace(request, request_id=request_id, prompt_token_ids=tokens, sampling_params=params)


def _record(request_id: RequestId, sent: WorkloadRequest, watch: Watch, start: float) -> RequestRecord:
    if request_id not in watch.token_times:
        return record_of(request_id, sent, sent.arrival_time, (), REFUSED)
    times = [time - start for time in watch.token_times[request_id]]
    error = None if len(times) == sent.num_output_tokens else TOO_LATE
    return record_of(request_id, sent, sent.arrival_time, times, error)
