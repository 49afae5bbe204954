"""Hosts that are nodes of a Ray cluster.

Ray starts, watches and ends workers, and carries none of their messages.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from loong.core.errors import ClusterError
from loong.core.placement import InstanceId
from loong.executor.lookahead import LookaheadMargin
from loong.executor.recovery import Backoff
from loong.executor.workers import WorkersExecutor
from loong.hardware.gpus import Gpu, check_alike
from loong.launcher.cluster.config import ClusterConfig
from loong.launcher.cluster.ray_actor import HostActor
from loong.launcher.cluster.ray_cluster import bundles_of, ray_cluster, reserve
from loong.launcher.cluster.run_directory import RunDirectory, run_directory
from loong.launcher.cluster.starter import Host, placed
from loong.launcher.cluster.workers import workers_of
from loong.processes.child import config_line
from loong.processes.child_processes import HOST_LOST, ChildProcess
from loong.worker.config import WorkerConfig

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 15.0
_RETRY_SECONDS = 1.0
_MAX_CALLS = 1000  # that an actor carries out at once: one for each worker, and signals


class RayHost:
    """A host of a placement group: one actor at a time, on a node that Ray chooses."""

    def __init__(
        self, host_id: int, group: PlacementGroup, bundle: Mapping[str, float], directory: Path, name: str
    ) -> None:
        """`bundle` is its part of the group. `directory` is this process's, for the workers of the head.

        Actors have the `name` of this process's group, and numbers.
        """
        self.host_id, self._name = host_id, name
        self._directory = None if host_id else str(directory)
        self._group, self._bundle = group, bundle
        self._actor: Any = None  # of Ray, which wraps the methods of HostActor
        self._opening = asyncio.Lock()
        self._tasks = set[asyncio.Task[None]]()
        self._numbers = count()
        self.place: Host | None = None  # None: it is lost, or not there yet

    async def open(self) -> None:
        """Return once its actor runs, on the present node or on the next that Ray has."""
        async with self._opening:
            while self.place is None:
                self._end_actor()
                self._actor = self._new_actor()
                try:
                    directory, address = await self._actor.place.remote()
                except RayError as error:
                    logger.warning("host %d did not start: %s", self.host_id, first_line(error))
                    await asyncio.sleep(_RETRY_SECONDS)
                    continue
                self.place = Host(Path(directory), address, is_head=self.host_id == 0)
                logger.info("host %d is the Ray node at %s", self.host_id, address)

    async def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs of its workers. Raises `ClusterError` if its driver reports none."""
        try:
            found: tuple[Gpu, ...] = await self._actor.gpus.remote()
        except RayError as error:
            raise ClusterError(f"host {self.host_id}: {error.cause or first_line(error)}") from error
        return found

    def _new_actor(self) -> Any:
        options = {
            "name": f"{self._name}, host {self.host_id}, start {next(self._numbers)}",
            "num_cpus": self._bundle["CPU"],
            "num_gpus": self._bundle.get("GPU", 0),
            "max_concurrency": _MAX_CALLS,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, self.host_id),
        }
        return ray.remote(HostActor).options(**options).remote(self._directory)

    def _end_actor(self) -> None:
        """End the last actor, so that a node that was unreachable for a while has no workers left."""
        if self._actor is not None:
            ray.kill(self._actor)

    def start(self, config: WorkerConfig, loan_id: str | None = None) -> ChildProcess:
        """Start a worker, of this engine, or of another by a loan."""
        number, actor = next(self._numbers), self._actor
        process = ChildProcess(lambda which: _forget(actor.send_signal.remote(number, which)))
        run = partial(actor.run.remote, number, config_line(config), loan_id)
        task = asyncio.create_task(self._follow(actor, run, process))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return process

    async def _follow(self, actor: Any, run: Callable[[], Any], process: ChildProcess) -> None:
        try:
            process.pid, code = await run()
        except RayTaskError as error:  # the actor goes on
            logger.error("host %d started no worker: %s", self.host_id, error.cause)  # noqa: TRY400
            code = 1
        except RayError as error:
            if actor is self._actor and self.place is not None:
                self.place = None
                logger.error("host %d is lost: %s", self.host_id, first_line(error))  # noqa: TRY400
            code = HOST_LOST
        process.end(code)

    async def close(self) -> None:
        """End its actor, and with it all workers."""
        if self.place is not None:
            with suppress(RayError, TimeoutError):
                await asyncio.wait_for(self._actor.close.remote(), _CLOSE_SECONDS)
        self._end_actor()


class RayHosts:
    """Implements WorkerStarter for the nodes of a Ray cluster, by the host of each instance."""

    def __init__(self, hosts: list[RayHost], host_ids: tuple[int, ...], directory: RunDirectory) -> None:
        """`directory` is that of the head."""
        self._hosts, self._host_ids, self._directory = hosts, host_ids, directory
        self._last_places = [host.place for host in hosts]

    @property
    def trouble(self) -> str:
        """See WorkerStarter."""
        return self._directory.trouble

    def host(self, instance_id: InstanceId) -> Host:
        """See WorkerStarter."""
        host_id = self._host_ids[instance_id]
        place = self._last_places[host_id] = self._hosts[host_id].place or self._last_places[host_id]
        assert place is not None, "all hosts were open at the start"
        return place

    async def wait_for_host(self, instance_id: InstanceId) -> None:
        """See WorkerStarter."""
        await self._hosts[self._host_ids[instance_id]].open()

    def start(self, config: WorkerConfig) -> ChildProcess:
        """See WorkerStarter."""
        return self._hosts[self._host_ids[config.instance_id]].start(config)

    def start_lent(self, config: WorkerConfig, instance_id: InstanceId, loan_id: str) -> ChildProcess:
        """See WorkerStarter."""
        address = self.host(instance_id).address
        assert address is not None, "nodes of Ray have one"
        return self._hosts[self._host_ids[instance_id]].start(placed(config, address), loan_id)

    def kill(self, processes: Iterable[ChildProcess]) -> None:
        """See WorkerStarter."""
        for process in processes:
            process.kill()


@asynccontextmanager
async def ray_workers(
    config: ClusterConfig, lookahead: LookaheadMargin | None = None, *, backoff: Backoff | None = None
) -> AsyncIterator[WorkersExecutor]:
    """Start every worker on the nodes of a Ray cluster, as `workers_of` does; this node is the head."""
    num_workers = [config.host_ids.count(host) * config.tp_size for host in range(config.num_hosts)]
    with run_directory() as directory, ray_cluster() as address:
        has_gpus = config.device != "cpu"
        bundles = bundles_of(num_workers, address, has_gpus=has_gpus)
        name = " ".join(filter(None, ("loong", config.log_source, f"process {os.getpid()}")))
        group = await asyncio.to_thread(reserve, bundles, config.start_timeout, name)
        hosts = [RayHost(i, group, bundle, directory.path, name) for i, bundle in enumerate(bundles)]
        try:
            await _open_all(hosts, config.start_timeout)
            if has_gpus:
                check_alike(await asyncio.gather(*(host.gpus() for host in hosts)))
            starter = RayHosts(hosts, config.host_ids, directory)
            async with workers_of(config, starter, lookahead, backoff=backoff) as executor:
                yield executor
        finally:
            await asyncio.gather(*(host.close() for host in hosts))
            remove_placement_group(group)


async def _open_all(hosts: Iterable[RayHost], timeout: float) -> None:
    try:
        async with asyncio.timeout(timeout):
            await asyncio.gather(*(host.open() for host in hosts))
    except TimeoutError:
        raise ClusterError(f"not all hosts started in Ray within {timeout:g} s; its logs say why") from None


def first_line(error: RayError) -> str:
    """Return what an error of Ray says, without the stacks that follow."""
    return str(error).splitlines()[0]


def _forget(_: object) -> None:
    """Wait for no answer."""
