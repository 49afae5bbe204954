"""Instances on the GPUs of this machine, a process each and without an engine, controlled by benchmarks."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, TypeVar

import torch
from one_gpu import PARAMS

from loong.core.events import ProducedToken
from loong.core.instance import ESPGroup
from loong.core.instructions import MoveKV, RequestInput, RunBatch
from loong.core.placement import InstanceId, KVSegment, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.positions import stripe
from loong.fabric.messages.network import Network
from loong.fabric.messages.peer_directory import PeerDirectory
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.protocol import Fabric
from loong.fabric.world import World
from loong.hardware.devices import DEVICES
from loong.model.load import load_model
from loong.model.shapes import find_config
from loong.model.tensor_parallel import Shard, SingleDevice
from loong.worker.batches.lease_ends import LeaseEnds
from loong.worker.config import ENVIRONMENT, WorkerConfig
from loong.worker.cuda_backend import CudaBackend
from loong.worker.kv.pool import KVPool
from loong.worker.runner import BatchRunner
from loong.worker.steps.group_exchange import KVExchange
from loong.worker.transfer import SegmentMover

T = TypeVar("T")

LINKS = ("memory", "nccl", "sockets")  # nccl: by whatever it finds; sockets: as between hosts
_HEAD, _SECRET = "127.0.0.2", "a secret of benchmarks"
_DEADLINE = 60.0  # seconds: kernels may have to be compiled in between


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of equal length, whose KV is spread evenly over some instances."""

    number: int
    context: int
    held_on: tuple[InstanceId, ...]
    name: str = "request"

    @property
    def owner_ids(self) -> tuple[str, ...]:
        """Return their ids."""
        return tuple(f"{self.name}-{number}" for number in range(self.number))

    def placement(self, owner_id: str) -> Placement:
        """Return the placement of a request's KV."""
        return Placement(tuple(self.segment(owner_id, i) for i in range(len(self.held_on))))

    def segment(self, owner_id: str, index: int) -> KVSegment:
        """Return the KV of a request on one of the instances."""
        positions = stripe(range(self.context), index, len(self.held_on))
        return KVSegment(owner_id, positions, self.held_on[index])

    def lease(
        self, batch_id: int, group: tuple[InstanceId, ...], masters: Sequence[InstanceId], num_steps: int
    ) -> RunBatch:
        """Return a lease of all of them, with these masters in turn."""
        queries, writes, inputs = [], [], []
        for number, owner_id in enumerate(self.owner_ids):
            master_id, end = masters[number % len(masters)], self.context
            queries.append(QueryBlock(owner_id, range(end, end + 1), master_id, Transfer.QUERY))
            writes.append(KVSegment(owner_id, range(end, end + num_steps), master_id))
            inputs.append(RequestInput(owner_id, [number], end, 1, self.placement(owner_id), PARAMS))
        plan = BatchPlan(ESPGroup(group), tuple(queries), tuple(writes), num_steps)
        return RunBatch(batch_id, plan, tuple(inputs))


@dataclass(frozen=True, slots=True)
class Ran:
    """The time when a batch began on one instance, and when its steps with tokens were reported."""

    begun_at: float
    reported_at: list[float]


class KeepingBackend(CudaBackend):
    """A backend that makes its exchange available to others than the runner."""

    exchange: KVExchange | None = None

    def group_exchange(self, fabric: Fabric, instance_id: InstanceId, shard: Shard) -> KVExchange | None:
        """See Backend."""
        self.exchange = super().group_exchange(fabric, instance_id, shard)
        return self.exchange


class GpuInstance:
    """A model with dummy weights, a pool, and a runner; one of a world, on the GPU of its number."""

    def __init__(
        self, model: str, num_slots: int, directory: Path, world: World, rank: int, network: Network | None
    ) -> None:
        config = find_config(model, "dummy")
        self.instance_id, self.world, self.config = rank, world, config
        limits = DEVICES["h200"].graph_limits
        self.backend = KeepingBackend(rank, config.torch_dtype, graph_limits=limits)
        self.backend.warm_up_lengths = ()  # prompts are not timed
        self.backend.device.use()
        decoder = load_model(model, "dummy", None, 0, SingleDevice(), self.backend.device)
        self.pool = KVPool(config.kv_layout(), num_slots, self.backend.device.torch_device)
        sockets = SocketFabric(directory, world, rank, deadline=_DEADLINE, network=network)
        self.fabric = self.backend.connect(sockets, Shard(config))
        self.fabric.wait_for_peers()
        self.runner = BatchRunner(rank, decoder, self.pool, self.fabric, self.backend)
        self.runner.warm_up()

    def hold(self, requests: Requests) -> None:
        """Take slots for the KV of requests here; its contents are arbitrary."""
        if self.instance_id in requests.held_on:
            index = requests.held_on.index(self.instance_id)
            for owner_id in requests.owner_ids:
                self.pool.allocate(owner_id, requests.segment(owner_id, index).positions)

    def forget(self, requests: Requests) -> None:
        """Free those slots."""
        for owner_id in requests.owner_ids:
            self.pool.release(owner_id)

    def run(self, commands: Sequence[RunBatch]) -> list[Ran]:
        """Run those of some batches that are for this instance, and undo each."""
        ran = []
        for command in commands:
            if self.instance_id in command.plan.group.instance_ids:
                ran.append(self._run(command))
                self._undo(command)
        return ran

    def run_chunks(self, commands: Sequence[RunBatch]) -> Ran:
        """Run batches each of which needs the KV of those before it, and undo all of them."""
        ran = [self._run(command) for command in commands]
        for command in commands:
            self._undo(command)
        return Ran(ran[0].begun_at, ran[-1].reported_at)

    def move(self, commands: Sequence[MoveKV]) -> Ran:
        """Run migrations; the destination forgets the KV."""
        mover = SegmentMover(self._worker_config(), {self.instance_id: self.pool}, self.fabric)
        ran = Ran(perf_counter(), [])
        for command in commands:
            if not mover.move(command):
                raise RuntimeError(f"migration {command.migration_id} failed")
            if command.migration.destination_id == self.instance_id:
                self.backend.device.wait()
                self.pool.release(command.migration.segment.owner_id)
            ran.reported_at.append(perf_counter())
        return ran

    def _run(self, command: RunBatch) -> Ran:
        reported_at: list[float] = []

        def report(_step: int, tokens: tuple[ProducedToken, ...], _is_last: bool) -> None:
            if tokens:  # an instance without tokens does not wait for its device
                reported_at.append(perf_counter())

        begun_at = perf_counter()
        self.runner.run(command, LeaseEnds(_DEADLINE).of(command), report)
        return Ran(begun_at, reported_at)

    def _undo(self, command: RunBatch) -> None:
        for segment in command.plan.writes:
            if segment.instance_id == self.instance_id:
                self.pool.release_positions([(segment.owner_id, segment.positions)])

    def _worker_config(self) -> WorkerConfig:
        return WorkerConfig(
            instance_id=self.instance_id,
            tp_rank=0,
            num_instances=self.world.num_instances,
            tp_size=1,
            model="",
            load_format="dummy",
            dtype=None,
            quantization=None,
            kv_cache_dtype="auto",
            seed=0,
            kv_capacity=0,
            host_kv_capacity=0,
            run_directory="",
            commands_endpoint="",
            reports_endpoint="",
            deadline=_DEADLINE,
            num_threads=1,
        )


class GpuGroup:
    """Instances 0 to N - 1, which do the same job at the same time, each in its process.

    `links` is one of LINKS. Where they are not memory, each instance counts as a host.
    """

    def __init__(self, model: str, num_instances: int, num_slots: int, links: str = LINKS[0]) -> None:
        self._directory = TemporaryDirectory(prefix="loong-")
        self.kv_bytes_per_token = find_config(model, "dummy").kv_layout().bytes_per_token
        self._last_id = 0
        spawning = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        begun_at = perf_counter()
        has_hosts = links != LINKS[0]
        world = World(num_instances, 1, tuple(range(num_instances)) if has_hosts else ())
        self._peers = PeerDirectory(_HEAD, _SECRET) if has_hosts else None
        for rank in range(num_instances):
            ours, theirs = spawning.Pipe()
            folder = Path(self._directory.name, str(rank) if has_hosts else "")
            folder.mkdir(exist_ok=True)
            network = None
            if self._peers is not None:
                network = Network(f"127.0.0.{2 + rank}", self._peers.endpoint, _SECRET)
            environment = {"NCCL_HOSTID": f"host {rank}"} if links == "sockets" else {}
            args = (theirs, environment, model, num_slots, folder, world, rank, network)
            process = spawning.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._processes.append(process)
            self._connections.append(ours)
        for connection in self._connections:
            _answer(connection)
        self.seconds_to_start = perf_counter() - begun_at

    def close(self) -> None:
        """End all instances."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join()
        if self._peers is not None:
            self._peers.close()

    def next_id(self) -> int:
        """Return an id for a batch or a migration."""
        self._last_id += 1
        return self._last_id

    def each(self, job: Callable[[GpuInstance], T]) -> list[T]:
        """Return a job's result on each instance; it is a partial of a function that modules can import."""
        return list(self.on(dict.fromkeys(range(len(self._connections)), job)).values())

    def on(self, jobs: Mapping[InstanceId, Callable[[GpuInstance], T]]) -> dict[InstanceId, T]:
        """Return the results of jobs that some instances do at the same time."""
        for instance_id, job in jobs.items():
            self._connections[instance_id].send(job)
        return {instance_id: _answer(self._connections[instance_id]) for instance_id in jobs}


def _serve(connection: Connection, environment: Mapping[str, str], *args: Any) -> None:
    """Do jobs until the parent has gone; `args` are those of GpuInstance."""
    os.environ |= {**ENVIRONMENT, **environment}
    torch.set_num_threads(1)  # as workers do
    try:
        instance = GpuInstance(*args)
        connection.send((None, None))
        while True:
            connection.send((None, connection.recv()(instance)))
    except EOFError:
        return
    except BaseException:
        connection.send((traceback.format_exc(), None))
        raise


def _answer(connection: Connection) -> Any:
    failure, answer = connection.recv()
    if failure is not None:
        raise RuntimeError(failure)
    return answer
