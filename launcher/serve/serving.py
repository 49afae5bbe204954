"""A server from its start to its last request."""

import asyncio
import gc
import logging
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import socket
from tempfile import gettempdir
from time import perf_counter, time

import uvloop

import loong
from loong.core.cost.cost_model import CostModel
from loong.core.errors import ClusterError, ConfigError
from loong.core.events import Drained
from loong.core.grammar import FIRST_GRAMMARS
from loong.core.instance import ElasticInstance
from loong.core.observer import Observer
from loong.core.placement import InstanceId
from loong.engine.client import EngineLimits
from loong.engine.engine import Engine
from loong.engine.faults import WorkerFaults
from loong.engine.loop import Scheduling
from loong.engine.refusals import Refusals
from loong.engine.scaling import Scaling
from loong.executor.lookahead import LookaheadMargin
from loong.executor.recovery import Backoff
from loong.executor.workers import WorkersExecutor
from loong.grammar.availability import is_installed
from loong.hardware.chosen_cost_model import chosen_cost_model, chosen_tiles
from loong.hardware.model_shape import shape_of
from loong.launcher.cluster.config import ClusterConfig
from loong.launcher.cluster.start import cluster_workers
from loong.launcher.serve.api_process import ApiProcessConfig
from loong.launcher.serve.api_processes import api_processes
from loong.launcher.serve.banner import log_banner, log_call_format, log_missing_grammars
from loong.launcher.serve.front import Front, front_here
from loong.launcher.serve.state_dump import StateDump
from loong.launcher.serve.status_line import log_status
from loong.launcher.serve.stop_signals import StopSignals
from loong.model.config import ModelConfig
from loong.observability.cost_model_alarm import CostModelAlarm
from loong.observability.decision_log.recent import RecentLines
from loong.observability.decision_log.runs import RequestRuns
from loong.observability.recording.lines import VERSION, Setting
from loong.observability.recording.refused import RefusedPlans
from loong.observability.timeline import Timeline
from loong.observability.worker_traces import WorkerTraces
from loong.processes.fork_server import ForkServer
from loong.processes.gc_tuning import tune_gc
from loong.processes.stacks import stacks_on_request
from loong.profiling.startup import calibrate
from loong.runs.run_logs import LogFiles, run_logs
from loong.scheduler.common.slo_targets import default_ttft
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.cost.recalibration import RecalibratedCostModel, Recalibration
from loong.scheduler.policy import admissible_tokens, check_instances, make_policy, policy_kind
from loong.server.api.large_json import compile_ahead
from loong.server.api.listen import allow_many_connections
from loong.server.app import create_app
from loong.server.cluster_app import cluster_of
from loong.server.local_engine import LocalEngineClient
from loong.server.metrics.request_observers import RequestObservers, Targets
from loong.server.metrics.spans import Spans, otlp_exporter
from loong.server.remote.forwarding import RemoteCluster
from loong.server.settings import ServerSettings
from loong.server.text.chat_renderer import try_templates
from loong.server.text.tokenizer import Tokenizer
from loong.state.cluster_state import ClusterState

logger = logging.getLogger(__name__)

FAILURE_GRACE_SECONDS = 10.0  # after a failure, so that clients of /health see the reason
FORCED_EXIT_CODE = 130


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """The configuration of `loong serve`."""

    model: ModelConfig
    cluster: ClusterConfig
    device: str
    policy_name: str
    policy: PolicyConfig
    cost_model: Path | None  # None: the device's roofline
    calibration_time: float  # seconds; 0 where the cost model stays as chosen
    is_recalibrated: bool
    server: ServerSettings
    tokenizer_folder: Path
    max_model_len: int | None  # None: what model and cluster can hold
    drain_timeout: float  # seconds
    trace_dir: Path | None = None  # None: no traces
    otlp_traces_endpoint: str | None = None  # None: no spans
    logs: LogFiles = field(default_factory=LogFiles)
    num_api_servers: int = 1  # 1: this process, which is the engine's too
    log_format: str = "text"
    allows_faults: bool = False


def serve_until_stopped(config: ServeConfig, listener: socket, fork_server: ForkServer | None) -> int:
    """Serve on a bound socket until SIGINT, SIGTERM or SIGHUP, which drain; a second one forces.

    `fork_server` is a `worker_fork_server` (None: workers are on other hosts). Returns 0 after a drain, 1 if
    the engine failed, 130 if it was forced.
    """
    try:
        return uvloop.run(_serve(config, listener, fork_server))
    except asyncio.CancelledError:
        return FORCED_EXIT_CODE


async def _serve(config: ServeConfig, listener: socket, fork_server: ForkServer | None) -> int:
    dump = StateDump()
    with stacks_on_request("the engine's process", dump.request):
        return await _serve_dumping(config, listener, fork_server, dump)


async def _serve_dumping(
    config: ServeConfig, listener: socket, fork_server: ForkServer | None, dump: StateDump
) -> int:
    limits = engine_limits(config)
    policy = make_policy(config.policy_name, config.policy)
    prior = served_cost_model(config, limits)
    config.logs.check()
    tokenizer = await _tokenizer(config)
    compile_ahead()
    allow_many_connections()
    signals = StopSignals()
    start = perf_counter()
    log_missing_grammars()
    cluster = _cluster(config, prior)
    margin = LookaheadMargin.on(prior.host)
    async with cluster_workers(cluster, margin, fork_server, backoff=Backoff()) as executor:
        clock_start = time() - executor.now
        logger.info("workers ready after %.1f s", perf_counter() - start)
        instances = executor.members.serving(cluster.instances)
        base, last_id = await calibrate(prior, instances, executor, config.calibration_time)
        recalibration = Recalibration(base, is_applied=config.is_recalibrated)
        cost_model = RecalibratedCostModel(recalibration) if config.is_recalibrated else base
        request_observers = _request_observers(config, cost_model, recalibration, clock_start)
        setting = _setting(config, instances, base, last_id)
        listeners = (request_observers.recent, request_observers.runs)
        targets_of = request_observers.target
        with run_logs(config.logs, setting, clock_start, listeners, targets_of) as logs:
            gc.freeze()  # what is there stays: a collection that walked all of it would hold up every stream
            tune_gc()
            state = ClusterState(instances, last_id)
            timeline = Timeline()
            alarm = CostModelAlarm(recalibration, config.cost_model)
            observers: tuple[Observer, ...] = (timeline, recalibration, alarm, *logs)
            refusals = Refusals(RefusedPlans(setting, Path(gettempdir())).record)
            scheduling = Scheduling(
                state, request_observers.timed(policy), cost_model, executor, observers, refusals
            )
            scaling = _scaling(config, executor)
            engine = Engine(scheduling, executor, limits, timeline, scaling)
            dump.snapshot = engine.snapshot
            running = asyncio.create_task(engine.run())
            signals.num_heeded = 1  # the first of several API processes takes requests while others start
            async with _front(config, engine, tokenizer, request_observers, listener, executor) as front:
                signals.num_heeded = 2
                scaling.report_limit = front.report_limits
                front.report_limits()  # it may have changed while API processes started
                status = asyncio.create_task(log_status(engine))
                try:
                    log_banner(config, limits, listener.getsockname()[1])
                    if is_installed():
                        executor.calls.prepare_first_grammars(FIRST_GRAMMARS)
                    running.add_done_callback(lambda _: front.admission.stop())
                    await _until_over(running, signals)
                    code = await _drain(config, front, signals)
                finally:
                    status.cancel()
                    executor.post(Drained())
                    await asyncio.wait([running])
    if request_observers.spans is not None:
        await asyncio.to_thread(request_observers.spans.close)
    logger.info("stopped")
    return 1 if running.exception() is not None else code


async def _tokenizer(config: ServeConfig) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(config.tokenizer_folder, config.model.eos_token_ids)
    tokenizer.make_ahead()
    await try_templates({tokenizer.chat_template, tokenizer.tool_template})
    log_call_format(tokenizer, config.server.tool_call_parser)
    return tokenizer


def _cluster(config: ServeConfig, prior: WorkCostModel) -> ClusterConfig:
    return replace(
        config.cluster,
        attention_tiles=chosen_tiles(config.cost_model),
        graph_limits=prior.graph_limits,
        log_format=config.log_format,
    )


def _front(
    config: ServeConfig,
    engine: Engine,
    tokenizer: Tokenizer,
    request_observers: RequestObservers,
    listener: socket,
    executor: WorkersExecutor,
) -> AbstractAsyncContextManager[Front]:
    """Return the context of the part that answers clients: this process, or API processes."""
    tracing = None if config.trace_dir is None else WorkerTraces(executor, config.trace_dir)
    faults = _faults(engine, executor) if config.allows_faults else None
    if config.num_api_servers == 1:
        app = create_app(engine, tokenizer, config.server, tracing, request_observers, faults)
        return front_here(app, listener)
    cluster = cluster_of(engine, config.server, tracing, request_observers, faults)
    client = LocalEngineClient(engine, cluster.admission, request_observers.spans)

    def process_config(socket_path: str) -> ApiProcessConfig:
        return ApiProcessConfig(
            config.server,
            engine.limits,
            str(config.tokenizer_folder),
            tuple(config.model.eos_token_ids),
            RemoteCluster(socket_path, has_dashboard=True, has_spans=request_observers.spans is not None),
            config.log_format,
        )

    return api_processes(process_config, config.num_api_servers, client, cluster, listener, executor.fail)


def _scaling(config: ServeConfig, executor: WorkersExecutor) -> Scaling:
    cluster, kind = config.cluster, policy_kind(config.policy_name)

    def check(num_instances: int) -> None:
        check_instances(config.policy_name, cluster.first(num_instances))

    def limit_of(instance_ids: Iterable[InstanceId]) -> int:
        return kind.max_request_tokens(dict.fromkeys(instance_ids, cluster.kv_capacity))

    numbers = cluster.num_instances, cluster.world_size
    return Scaling(executor.members, *numbers, cluster.kv_capacity, check, limit_of)


def _faults(engine: Engine, executor: WorkersExecutor) -> WorkerFaults:
    assert executor.restarts is not None, "lost instances of a server start again"
    return WorkerFaults(executor.restarts.processes_of, lambda: engine.snapshot().pools)


def _request_observers(
    config: ServeConfig, cost_model: CostModel, recalibration: Recalibration, clock_start: float
) -> RequestObservers:
    def target(num_prompt_tokens: int) -> Targets:
        widest = cost_model.prefill_terms(config.cluster.num_instances)
        return Targets(default_ttft(num_prompt_tokens, widest, config.policy), config.policy.target_tpot)

    endpoint, spans = config.otlp_traces_endpoint, None
    if endpoint is not None:
        spans = Spans(otlp_exporter(endpoint), config.server.served_model_name, clock_start)
    return RequestObservers(
        config.policy_name, RecentLines(), RequestRuns(), lambda: recalibration.errors, target, spans
    )


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
    )


async def _until_over(running: asyncio.Task[None], signals: StopSignals) -> None:
    """Wait for a signal or the engine's failure, whichever is first."""
    running.add_done_callback(_log_failure)
    asked_to_stop = asyncio.create_task(signals.first.wait())
    await asyncio.wait([running, asked_to_stop], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        logger.error("/health reports it for %.0f s, then the server ends", FAILURE_GRACE_SECONDS)
        await asyncio.wait([asked_to_stop], timeout=FAILURE_GRACE_SECONDS)


async def _drain(config: ServeConfig, front: Front, signals: StopSignals) -> int:
    """Refuse new connections and requests, and let open ones finish, for a while.

    The requests left then fail.

    Returns the exit code.
    """
    await front.stop_listening()
    admission, timeout = front.admission, config.drain_timeout
    admission.close()  # connections that are open may send more
    if num_open := admission.num_in_flight:
        logger.info("draining %d request(s) for at most %g s; a second signal ends it", num_open, timeout)
    finished = asyncio.create_task(admission.wait_until_idle())
    forced = asyncio.create_task(signals.second.wait())
    await asyncio.wait([finished, forced], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    if num_open := admission.num_in_flight:
        logger.warning("%d request(s) are cut off", num_open)
        return FORCED_EXIT_CODE if forced.done() else 1
    return 0


def _log_failure(running: asyncio.Task[None]) -> None:
    error = None if running.cancelled() else running.exception()
    if isinstance(error, ClusterError):
        logger.error("the engine failed: %s", error)
    elif error is not None:
        logger.error("the engine failed by an internal error:", exc_info=error)


def served_cost_model(config: ServeConfig, limits: EngineLimits) -> WorkCostModel:
    """Return the cost model that plans begin with. Raises `ConfigError` if its file is of something else."""
    cluster = config.cluster
    return chosen_cost_model(
        config.cost_model,
        shape_of(config.model),
        config.device,
        num_instances=cluster.world_size,
        tp_size=cluster.tp_size,
        host_ids=cluster.host_ids,
        greatest={
            "dop": cluster.world_size,
            "num_tokens": config.policy.max_num_batched_tokens,
            "num_keys": limits.max_model_len,
        },
    )


def engine_limits(config: ServeConfig) -> EngineLimits:
    """Return the most that one request may have, at the start and by its model.

    Raises `ConfigError` if the model cannot have so much, or the policy cannot run the instances.
    """
    model, cluster = config.model, config.cluster
    max_request_kv, most = (
        admissible_tokens(config.policy_name, cluster.first(number))
        for number in (cluster.num_instances, cluster.world_size)
    )
    max_model_len = config.max_model_len or min(model.max_length, most)
    model.check_max_length(max_model_len)
    if max_model_len > model.max_length:
        raise ConfigError(
            f"--max-model-len is {max_model_len}, but the model was made for {model.max_length}"
        )
    return EngineLimits(max_model_len, max_request_kv, model.vocab_size)
