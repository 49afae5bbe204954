"""Builds the parts of a server around its workers."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import gettempdir
from time import perf_counter, time

from msgspec import structs

import loong
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.observer import Observer
from loong.core.placement import InstanceId
from loong.engine.engine import Engine
from loong.engine.loop import Scheduling
from loong.engine.refusals import Refusals
from loong.engine.scaling import Scaling
from loong.executor.lookahead import LookaheadMargin
from loong.executor.recovery import Backoff
from loong.executor.workers import WorkersExecutor
from loong.hardware.chosen_cost_model import chosen_tiles
from loong.launcher.cluster.config import ClusterConfig
from loong.launcher.cluster.start import cluster_workers
from loong.launcher.serve.config import ServeConfig
from loong.launcher.serve.prepare import Prepared
from loong.launcher.serve.request_observers import request_observers
from loong.observability.cost_model_alarm import CostModelAlarm
from loong.observability.kv_events.observer import kv_events
from loong.observability.recording.lines import VERSION, Setting
from loong.observability.recording.refused import RefusedPlans
from loong.observability.timeline import Timeline
from loong.processes.fork_server import ForkServer
from loong.processes.gc_tuning import tune_gc
from loong.profiling.startup import calibrate
from loong.runs.run_logs import run_logs
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.cost.recalibration import RecalibratedCostModel, Recalibration
from loong.scheduler.policy import check_instances, policy_kind
from loong.server.metrics.request_observers import RequestObservers
from loong.state.cluster_state import ClusterState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """The parts of a server whose workers are ready. Its engine does not run yet."""

    prepared: Prepared
    executor: WorkersExecutor
    observers: RequestObservers
    scaling: Scaling
    engine: Engine
    observe: Callable[[Observer], None]


@asynccontextmanager
async def build(prepared: Prepared, fork_server: ForkServer | None) -> AsyncIterator[Served]:
    """Start the workers, and yield the parts of the server. Its workers and logs end with the context."""
    start = perf_counter()
    config, prior = prepared.config, prepared.prior
    cluster = _cluster(config, prior)
    margin = LookaheadMargin.on(prior.host)
    async with cluster_workers(cluster, margin, fork_server, backoff=Backoff()) as executor:
        clock_start = time() - executor.now
        logger.info("workers ready after %.1f s", perf_counter() - start)
        instances = executor.members.serving(cluster.instances)
        base, last_id = await calibrate(prior, instances, executor, config.calibration_time)
        recalibration = Recalibration(base, is_applied=config.is_recalibrated)
        cost_model = RecalibratedCostModel(recalibration) if config.is_recalibrated else base
        observers = request_observers(config, cost_model, recalibration, clock_start)
        setting = structs.replace(_setting(config, instances, base, last_id), least_saved=cluster.least_saved)
        listeners = (observers.recent, observers.runs)
        with run_logs(config.logs, setting, clock_start, listeners, observers.target) as logs:
            gc.freeze()  # what is there stays: a collection that walked all of it would hold up every stream
            tune_gc()
            timeline = Timeline()
            alarm = CostModelAlarm(recalibration, config.cost_model)
            scheduling = Scheduling(
                ClusterState(
                    instances,
                    last_id,
                    keeps_prefixes=config.keeps_prefixes,
                    least_saved=cluster.least_saved,
                    windows=cluster.windows,
                ),
                observers.timed(prepared.policy),
                cost_model,
                executor,
                (timeline, recalibration, alarm, *logs),
                Refusals(RefusedPlans(setting, Path(gettempdir())).record),
            )
            scaling = _scaling(config, executor)
            engine = Engine(scheduling, executor, prepared.limits, timeline, scaling)
            with kv_events(config.kv_events, scheduling.state.owners) as events:
                for observer in events:
                    scheduling.observe(observer)
                yield Served(prepared, executor, observers, scaling, engine, scheduling.observe)
    if observers.spans is not None:
        await asyncio.to_thread(observers.spans.close)


def _cluster(config: ServeConfig, prior: WorkCostModel) -> ClusterConfig:
    return replace(
        config.cluster,
        attention_tiles=chosen_tiles(config.cost_model),
        graph_limits=prior.graph_limits,
        least_saved=prior.least_saved if config.relays else None,
        log_format=config.log_format,
    )


def _scaling(config: ServeConfig, executor: WorkersExecutor) -> Scaling:
    cluster, kind = config.cluster, policy_kind(config.policy_name)

    def check(num_instances: int) -> None:
        check_instances(config.policy_name, cluster.first(num_instances))

    def limit_of(instance_ids: Iterable[InstanceId]) -> int:
        pools = {i: cluster.kv_capacity_of(i) for i in instance_ids}
        memory = {i: n for i, n in pools.items() if cluster.kind_of(i) is InstanceKind.ATTENTION}
        own = kind.limit_of({i: n for i, n in pools.items() if i not in memory}, memory)
        return own + (config.policy.max_loan or 0)

    numbers = cluster.num_instances, cluster.most_instances
    return Scaling(executor.members, *numbers, cluster.kv_capacity, check, limit_of, cluster.memory_numbers)


def _setting(
    config: ServeConfig, instances: tuple[ElasticInstance, ...], cost_model: WorkCostModel, last_id: int
) -> Setting:
    """Return the settings that a recording needs for a replay to plan the same."""
    return Setting(
        version=VERSION,
        loong_version=loong.__version__,
        instances=instances,
        policy=config.policy_name,
        policy_config=config.policy,
        cost_model=cost_model,
        is_recalibrated=config.is_recalibrated,
        last_id=last_id,
        keeps_prefixes=config.keeps_prefixes,
        windows=config.cluster.windows,
    )
