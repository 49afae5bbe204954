"""Instances of one process that run steps of a batch, each with a pool and its end of the data plane."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from attention_steps import GivenStep
from torch import Tensor

from loong.attention.attention_step import AttentionStep
from loong.attention.elastic import ElasticAttention
from loong.attention.push import await_stored
from loong.core.kv_layout import KVLayout
from loong.core.placement import InstanceId, KVSegment
from loong.core.request import RequestId
from loong.fabric.lanes import Lane
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.world import World
from loong.kernels import attend
from loong.kernels.kv_rows import quantized
from loong.model.device import CpuDevice
from loong.model.tensor_parallel import Shard
from loong.model.tiny import CONFIG
from loong.worker.backend import CpuBackend
from loong.worker.kv.pool import KVPool
from loong.worker.service import AttentionService

TOLERANCE = 2e-5


@dataclass(frozen=True)
class Heads:
    """Numbers of query heads and KV heads, and the dimension of a head."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 4


@dataclass(frozen=True)
class Tokens:
    """Queries [T, H, D] and KV [T, 2, K, D] of each position of each request."""

    q: Mapping[RequestId, Tensor]
    kv: Mapping[RequestId, Tensor]

    @classmethod
    def of(cls, step: GivenStep, heads: Heads, seed: int) -> "Tokens":
        """Return random tokens of all requests of a step, whose queries attend mainly a few keys."""
        generator, q, kv = torch.Generator().manual_seed(seed), {}, {}
        for request_id, known in step.known.items():
            num = max(known) + 1
            q[request_id] = 3 * torch.randn(num, heads.num_heads, heads.head_dim, generator=generator)
            kv[request_id] = torch.randn(num, 2, heads.num_kv_heads, heads.head_dim, generator=generator)
        first_of: dict[KVSegment, RequestId] = {}
        for request_id, placement in step.placements.items():
            for segment in placement.shared:
                its = list(segment.positions)
                kv[request_id][its] = kv[first_of.setdefault(segment, request_id)][its]
        return cls(q, kv)

    def expected(self, step: GivenStep, window: int | None = None) -> dict[tuple[RequestId, int], Tensor]:
        """Return the attention of each query over all KV in one place, by request and position."""
        found = {}
        for request_id, known in step.known.items():
            keys = torch.tensor(sorted(known))
            kv = self.kv[request_id][keys]
            for position in (p for block in step.batch.blocks_of(request_id) for p in block.positions):
                own = torch.tensor([position])
                found[request_id, position] = attend(
                    self.q[request_id][own],
                    kv[:, 0],
                    kv[:, 1],
                    scale=self.q[request_id].shape[-1] ** -0.5,
                    q_positions=own,
                    kv_positions=keys,
                    window=window,
                ).out[0]
        return found


@dataclass(frozen=True)
class Outcome:
    """A step's attention by request and position, and the pool of each instance after it."""

    out: Mapping[tuple[RequestId, int], Tensor]
    pools: Mapping[InstanceId, KVPool]


class AttentionWorld:
    """Instances 0 to N - 1, each a thread."""

    def __init__(self, directory: Path, num_instances: int, deadline: float) -> None:
        self.device = CpuDevice()
        world = World(num_instances, 1)
        self._fabrics = {
            i: SocketFabric(directory, world, i, deadline=deadline) for i in range(num_instances)
        }
        for fabric in self._fabrics.values():
            fabric.wait_for_peers()
        self._threads = ThreadPoolExecutor(num_instances)
        self._batch_ids = count(1)

    def close(self) -> None:
        """End all threads and leave the world."""
        self._threads.shutdown()
        for instance_id in list(self._fabrics):
            self.lose(instance_id)

    def lose(self, instance_id: InstanceId) -> None:
        """Let an instance leave, as one whose process is gone."""
        self._fabrics.pop(instance_id).close()

    def run(
        self, step: GivenStep, tokens: Tokens, pools: Mapping[InstanceId, KVPool] | None = None
    ) -> Outcome:
        """Run a step on all instances that have a part in it. Raises the error of one, if any has one."""
        running, pools = self.begin(step, tokens, pools=pools)
        out: dict[tuple[RequestId, int], Tensor] = {}
        for future in running.values():
            out |= future.result()
        return Outcome(out, pools)

    def begin(
        self,
        step: GivenStep,
        tokens: Tokens,
        absent: tuple[InstanceId, ...] = (),
        pools: Mapping[InstanceId, KVPool] | None = None,
    ) -> tuple[Mapping[InstanceId, Future[dict[tuple[RequestId, int], Tensor]]], Mapping[InstanceId, KVPool]]:
        """Begin a step on all instances that have a part in it and are not absent.

        They have the KV that the step says, but those of `pools` what is there.
        """
        batch_id, running = next(self._batch_ids), {}
        present = [instance_id for instance_id in step.instance_ids if instance_id not in absent]
        found = {i: _pool(step, i, tokens) for i in present} | dict(pools or {})
        for instance_id, pool in found.items():
            if instance_id in present:
                is_member = instance_id in step.batch.group.instance_ids
                part = self._take_part if is_member else self._serve
                running[instance_id] = self._threads.submit(part, batch_id, instance_id, step, tokens, pool)
        return running, found

    def _take_part(
        self, batch_id: int, instance_id: InstanceId, step: GivenStep, tokens: Tokens, pool: KVPool
    ) -> dict[tuple[RequestId, int], Tensor]:
        fabric, device = self._fabrics[instance_id], self.device
        own = AttentionStep(instance_id, step.batch, step.placements, pool)
        with fabric.batch(batch_id, step.batch.group.instance_ids, step.holder_ids) as batch:
            attention = ElasticAttention(own, batch, device)
            target, rows = attention.new_kv(0)
            target[rows] = stored(_rows(own, tokens.kv), target)
            out = attention(0, _rows(own, tokens.q))
            if step.batch.pushes:
                await_stored(batch, step.batch, instance_id)
        tokens_of_rows = [(block.request_id, p) for block in own.blocks for p in block.positions]
        return dict(zip(tokens_of_rows, out, strict=True))

    def _serve(
        self, batch_id: int, instance_id: InstanceId, step: GivenStep, tokens: Tokens, pool: KVPool
    ) -> dict[tuple[RequestId, int], Tensor]:
        _, num_heads, head_dim = next(iter(tokens.q.values())).shape
        _, _, num_kv_heads, _ = next(iter(tokens.kv.values())).shape
        config = replace(
            CONFIG, num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
        fabric, backend = self._fabrics[instance_id], CpuBackend()
        backend.device = self.device
        service = AttentionService(instance_id, Shard(config), pool, fabric, backend)
        with fabric.serve(batch_id, step.batch.group.instance_ids)(Lane.LONG_STEP) as members:
            service.answer(step.batch, step.placements, members, self.device)
        return {}


@contextmanager
def attention_world(num_instances: int, deadline: float = 60.0) -> Iterator[AttentionWorld]:
    """Instances that can reach each other."""
    with TemporaryDirectory(prefix="loong-") as name:
        world = AttentionWorld(Path(name), num_instances, deadline)
        try:
            yield world
        finally:
            world.close()


def _pool(step: GivenStep, instance_id: InstanceId, tokens: Tokens) -> KVPool:
    """Return an instance's pool with its part of the history, and NaN everywhere else."""
    row_shape = tuple(next(iter(tokens.kv.values())).shape[1:])
    return pool_with_history(step, instance_id, tokens, KVLayout(1, row_shape, "float32"))


def pool_with_history(step: GivenStep, instance_id: InstanceId, tokens: Tokens, layout: KVLayout) -> KVPool:
    """Return an instance's pool with its part of the history, slots for its new KV, and NaN elsewhere."""
    pool = step.pool_of(instance_id, layout)
    layer = pool.layer(0)
    for request_id, placement in step.placements.items():
        for positions in placement.on(instance_id):
            history = stored(tokens.kv[request_id][list(positions)], layer)
            layer[pool.slots(request_id, positions)] = history
    step.allocate_new(instance_id, pool)
    return pool


def stored(kv: Tensor, target: Tensor) -> Tensor:
    """Return KV [T, 2, K, D] as rows like those of the target: of as many bytes a row, or in FP8."""
    if target.dtype == torch.uint8 and target.shape[1] != kv.shape[1:].numel() * kv.itemsize:
        return quantized(kv)
    return kv.flatten(1).view(target.dtype).view(len(kv), *target.shape[1:])


def _rows(own: AttentionStep, values: Mapping[RequestId, Tensor]) -> Tensor:
    """Return the values of a step's rows on one instance."""
    rows = [values[block.request_id][list(block.positions)] for block in own.blocks]
    return torch.cat([next(iter(values.values()))[:0], *rows])
