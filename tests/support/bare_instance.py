"""An instance without an engine. Imports nothing that is slow to import."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from constraints import constraints_of

from loong.core.events import ProducedToken
from loong.core.instructions import ReleaseKV, RunBatch, ShareKV
from loong.core.placement import InstanceId, OwnerId
from loong.core.prompt_logprobs import PromptLogprobs
from loong.fabric.protocol import Fabric
from loong.fabric.traffic import TrafficSnapshot
from loong.model.load import load_model
from loong.model.shapes import find_config
from loong.model.tensor_parallel import Shard, SingleDevice
from loong.worker.backend import Backend
from loong.worker.config import WorkerConfig
from loong.worker.kv.pool import KVPool
from loong.worker.kv_part import KVPart
from loong.worker.parts import MemoryPart
from loong.worker.runner import BatchRunner
from loong.worker.service import AttentionService


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends a lease before `step`; the instance receives it during its step number `reported_in`, from 1."""

    step: int
    reported_in: int = 1


@dataclass(slots=True)
class ReceivedEnd:
    """The end of a lease as an instance sees it at each step boundary."""

    stop: Stop | None
    num_steps: int
    num_asked: int = 0

    def step(self) -> int:
        self.num_asked += 1
        is_reported = self.stop is not None and self.num_asked >= self.stop.reported_in
        return self.stop.step if self.stop is not None and is_reported else self.num_steps

    def wait_for_room(self, num_steps: int) -> None:
        """There is."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a command on one instance: `tokens` with the steps that made them."""

    num_steps: int
    tokens: tuple[tuple[int, ProducedToken], ...]
    traffic: TrafficSnapshot
    num_slots_used: int
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


def bare_config(
    instance_id: InstanceId, num_instances: int, kv_capacity: int, host_kv_capacity: int = 0
) -> WorkerConfig:
    """Return the config of an instance of one rank that nobody else reads."""
    return WorkerConfig(
        instance_id=instance_id,
        tp_rank=0,
        num_instances=num_instances,
        tp_size=1,
        model="",
        load_format="dummy",
        dtype=None,
        quantization=None,
        kv_cache_dtype="auto",
        seed=0,
        kv_capacity=kv_capacity,
        host_kv_capacity=host_kv_capacity,
        run_directory="",
        commands_endpoint="",
        reports_endpoint="",
        deadline=1.0,
        num_threads=1,
    )


class WeightlessInstance:
    """An instance that keeps KV and serves it, and has no weights."""

    def __init__(
        self, fabric: Fabric, instance_id: InstanceId, folder: Path, backend: Backend, num_slots: int = 1024
    ) -> None:
        config = bare_config(instance_id, fabric.world.num_instances, num_slots)
        shard = Shard(find_config(str(folder)))
        self._kv = KVPart(config, shard, fabric, backend)
        self._kv.warm_up(MemoryPart(config, shard, fabric, backend).warm_up(self._kv.pool))
        self._served: set[OwnerId] = set()
        self._fabric, self._instance_id = fabric, instance_id

    def end_service(self) -> None:
        """Return once nothing is served."""
        for owner_id in self._served:
            self._kv.wait_for(owner_id)

    def carry_out(self, command: RunBatch | ReleaseKV | ShareKV) -> Outcome:
        """Serve a batch if this instance holds KV of it, after those before it."""
        assert isinstance(command, RunBatch), "it is given no others yet"
        before = self._fabric.traffic.snapshot()
        for owner_id in command.plan.request_ids:
            self._kv.wait_for(owner_id)
        if self._instance_id in command.holder_ids:
            self._kv.begin_serving(command)
            self._served.update(command.plan.request_ids)
        return Outcome(0, (), self._fabric.traffic.snapshot() - before, self._kv.pool.num_used)


class BareInstance:
    """Model, pool and runner; what it knows of the end of every lease is `stop`."""

    def __init__(
        self,
        fabric: Fabric,
        instance_id: InstanceId,
        folder: Path,
        stop: Stop | None,
        backend: Backend,
        num_slots: int = 1024,
        tokenizer: Path | None = None,
    ) -> None:
        ranks = SingleDevice() if fabric.world.tp_size == 1 else fabric.tensor_parallel
        model = load_model(str(folder), "safetensors", None, 0, ranks, backend.device)
        shard, device = model.shard, backend.device.torch_device
        self._pool = KVPool(shard.kv_layout, num_slots, device)
        constraints = constraints_of(tokenizer, shard.config.vocab_size)
        self._runner = BatchRunner(instance_id, model, self._pool, fabric, backend, constraints)
        self._runner.warm_up()
        self._service = AttentionService(instance_id, shard, self._pool, fabric, backend)
        self._service.warm_up(self._runner.served)
        self._served: set[OwnerId] = set()
        self._fabric, self._instance_id, self._stop = fabric, instance_id, stop

    def poison(self) -> None:
        """Fill all memory of the pool with NaN, so that a read of unwritten memory shows."""
        for layer in range(self._pool.num_layers):
            self._pool.layer(layer).fill_(torch.nan)

    def end_service(self) -> None:
        """Return once nothing is served."""
        for owner_id in self._served:
            self._service.wait_for(owner_id)

    def share(self, command: ShareKV) -> None:
        """Let a request have slots of others."""
        for owner_id, positions, _ in command.segments:
            self._pool.share(owner_id, command.user_id, positions)

    def carry_out(self, command: RunBatch | ReleaseKV | ShareKV) -> Outcome:
        """Do this instance's part of a command, if it has one.

        What it serves goes on meanwhile, but for the same requests.
        """
        before, num_steps = self._fabric.traffic.snapshot(), 0
        if isinstance(command, ShareKV):
            own = tuple(s for s in command.segments if s.instance_id == self._instance_id)
            self.share(replace(command, segments=own))
            return Outcome(0, (), self._fabric.traffic.snapshot() - before, self._pool.num_used)
        produced: list[tuple[int, ProducedToken]] = []
        found: tuple[PromptLogprobs, ...] = ()
        owner_ids = (command.owner_id,) if isinstance(command, ReleaseKV) else command.plan.request_ids
        for owner_id in owner_ids:
            self._service.wait_for(owner_id)
        if isinstance(command, ReleaseKV):
            self._pool.release(command.owner_id)
        elif self._instance_id in command.plan.group.instance_ids:
            begun = self._runner.begin(command)
            num_steps = begun.finish(
                ReceivedEnd(self._stop, command.plan.num_steps),
                lambda step, tokens, _is_last: produced.extend((step, token) for token in tokens),
            )
            found = begun.prompt_logprobs()
        elif self._instance_id in command.holder_ids:
            self._service.begin(command)
            self._served.update(command.plan.request_ids)
        traffic = self._fabric.traffic.snapshot() - before
        return Outcome(num_steps, tuple(produced), traffic, self._pool.num_used, found)
