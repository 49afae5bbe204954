"""Worker processes on this machine: started together, watched, and ended with this process."""

import logging
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from loong.core.cost.cuda_graph_limits import NO_GRAPHS, CudaGraphLimits
from loong.core.errors import ConfigError
from loong.core.instance import ElasticInstance, InstanceKind, host_tier_id
from loong.executor.endpoints import Endpoints, WorkerId
from loong.executor.lookahead import LookaheadMargin
from loong.executor.recovery import Backoff
from loong.executor.workers import WorkersExecutor
from loong.launcher.serve.child_processes import ForkServer, guarded
from loong.launcher.serve.worker_processes import WorkerProcesses
from loong.wire import HEARTBEAT_SECONDS
from loong.worker.config import ENVIRONMENT, WorkerConfig

logger = logging.getLogger(__name__)

_WORKER = "loong.worker.process"
MAX_SOCKET_PATH = 107


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The instances to start and the model they hold. Capacities are tokens an instance.

    On `device` cuda, the ranks of instances take the GPUs of the host in turn, and `fabric`, one of FABRICS,
    moves tensors among them. `attention_tiles` are TileSizes that were measured (None: the usual ones).
    On GPUs, `graph_limits` say which steps are captured, as in the cost model of plans.
    Each worker sends a heartbeat every `heartbeat` seconds. While the cluster serves, it may grow to
    `max_instances` (None: not at all).
    """

    model: str
    load_format: str = "safetensors"
    dtype: str | None = None
    seed: int = 0
    num_instances: int = 4
    max_instances: int | None = None
    tp_size: int = 1
    kv_capacity: int = 16384
    host_kv_capacity: int = 0
    deadline: float = 60.0
    start_timeout: float = 600.0
    heartbeat: float = HEARTBEAT_SECONDS
    device: str = "cpu"
    fabric: str = "auto"
    attention_tiles: tuple[int, ...] | None = None
    graph_limits: CudaGraphLimits = NO_GRAPHS
    tokenizer_folder: str | None = None  # None: no request can be held to a JSON schema
    log_format: str = "text"

    def __post_init__(self) -> None:
        for name in ("num_instances", "tp_size", "kv_capacity"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be at least 1, but is {value}")
        if self.max_instances is not None and self.max_instances < self.num_instances:
            raise ConfigError(
                f"--max-instances is {self.max_instances}, but --num-instances is {self.num_instances}"
            )
        if self.world_size > self.num_instances and self.device != "cpu":
            raise ConfigError(
                "--max-instances needs --device cpu: fabrics of GPUs keep the memory of their peers mapped"
            )

    @property
    def world_size(self) -> int:
        """Return the most instances that there can be: ids and shared memory have room for them."""
        return self.num_instances if self.max_instances is None else self.max_instances

    @property
    def instances(self) -> tuple[ElasticInstance, ...]:
        """Return the first instances, and their host tiers if there are any, all empty."""
        return self.first(self.num_instances)

    def first(self, num_instances: int) -> tuple[ElasticInstance, ...]:
        """Return the instances of the lowest ids, and their host tiers if there are any, all empty."""
        full = [
            ElasticInstance(i, self.tp_size, InstanceKind.FULL, self.kv_capacity, serves=self.device == "cpu")
            for i in range(num_instances)
        ]
        hosts = [
            ElasticInstance(
                host_tier_id(i, self.world_size), self.tp_size, InstanceKind.HOST, self.host_kv_capacity
            )
            for i in range(num_instances)
        ]
        return (*full, *(hosts if self.host_kv_capacity else ()))


@asynccontextmanager
async def local_workers(
    config: ClusterConfig,
    lookahead: LookaheadMargin | None = None,
    fork_server: ForkServer | None = None,
    *,
    backoff: Backoff | None = None,
) -> AsyncIterator[WorkersExecutor]:
    """Start every worker, wait until all are ready, and yield their executor; at the end none is left.

    The executor predicts the ends of batches with a margin of `lookahead`, or never (None).
    `fork_server` is a `worker_fork_server` (None: one for these workers). With `backoff`, an instance that
    is lost from then on is started again, and instances can be added and removed.

    Raises `ClusterError` with the worker's own words if one cannot start.
    """
    _remove_leftovers()
    with ExitStack() as stack:
        directory = stack.enter_context(TemporaryDirectory(prefix=f"loong-{os.getpid()}-"))
        _check_socket_path(Path(directory))
        if fork_server is None:
            fork_server = stack.enter_context(closing(worker_fork_server()))
        everywhere = _commands(config, Path(directory))
        endpoints = Endpoints(
            reports=f"ipc://{directory}/reports",
            commands={w: where for w, where in everywhere.items() if w[0] < config.num_instances},
            num_instances=config.world_size,
        )
        workers = WorkerProcesses(
            fork_server,
            partial(_worker_config, config, endpoints.reports, Path(directory)),
            everywhere,
            config.first(config.world_size),
            backoff or Backoff(),
        )
        restarts = None if backoff is None else workers.restarts
        executor = WorkersExecutor(endpoints, lookahead, config.heartbeat, restarts)
        is_ready = False
        tasks = [
            guarded(executor.read_reports(), executor.fail),
            guarded(executor.watch_silence(), executor.fail),
        ]
        try:
            workers.start(endpoints.commands, executor)
            await executor.members.wait_until_ready(config.start_timeout)
            is_ready = True
            yield executor
        finally:
            for task in tasks:
                task.cancel()
            workers.forget()
            executor.shut_down()
            executor.close()
            if not is_ready:  # workers that are loading do not listen yet, and have nothing to lose
                workers.kill()
            await workers.stop()


def worker_fork_server() -> ForkServer:
    """Start what starts workers, of any number of clusters."""
    return ForkServer(_WORKER, ENVIRONMENT)


def _remove_leftovers() -> None:
    """Remove the run directories of servers that were killed before they could do so."""
    for directory in Path(gettempdir()).glob("loong-[0-9]*-*"):
        pid = directory.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            logger.info("removing %s, left by a server that was killed", directory)
            shutil.rmtree(directory, ignore_errors=True)


def _check_socket_path(directory: Path) -> None:
    """Raise `ConfigError` if the longest socket path in this directory exceeds the system's limit."""
    longest = len(os.fsencode(directory / "worker-0000-00-000"))
    if longest > MAX_SOCKET_PATH:
        raise ConfigError(
            f"sockets in {directory} would have paths of {longest} bytes, but {MAX_SOCKET_PATH} are "
            "the most; set TMPDIR to a shorter one"
        )


def _commands(config: ClusterConfig, directory: Path) -> dict[WorkerId, str]:
    """Return the first endpoints of all workers that there can be."""
    workers = [(i, rank) for i in range(config.world_size) for rank in range(config.tp_size)]
    return {(i, rank): f"ipc://{directory}/worker-{i}-{rank}" for i, rank in workers}


def _worker_config(
    config: ClusterConfig, reports: str, directory: Path, worker_id: WorkerId, commands: str
) -> WorkerConfig:
    instance_id, tp_rank = worker_id
    return WorkerConfig(
        instance_id=instance_id,
        tp_rank=tp_rank,
        num_instances=config.world_size,
        tp_size=config.tp_size,
        model=config.model,
        load_format=config.load_format,
        dtype=config.dtype,
        seed=config.seed,
        kv_capacity=config.kv_capacity,
        host_kv_capacity=config.host_kv_capacity,
        run_directory=str(directory),
        commands_endpoint=commands,
        reports_endpoint=reports,
        deadline=config.deadline,
        num_threads=1,
        heartbeat=config.heartbeat,
        device=config.device,
        fabric=config.fabric,
        attention_tiles=config.attention_tiles,
        graph_limits=config.graph_limits,
        tokenizer_folder=config.tokenizer_folder,
        log_format=config.log_format,
        is_late=config.world_size > config.num_instances,
    )
