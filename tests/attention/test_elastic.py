"""A step's attention equals that of one instance with all KV, on every role of an instance."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import count, product

import pytest
import torch
from kernel_cases import TOLERANCES
from socket_worlds import Carrier, run_in_world
from torch import Tensor

from loong.attention.attention_step import AttentionStep
from loong.attention.elastic import ElasticAttention
from loong.attention.exchange import load_kernels
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId, KVSegment, Placement, striped
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.positions import stripe
from loong.core.request import RequestId
from loong.fabric.memory.symmetric_fabric import SymmetricFabric
from loong.fabric.protocol import Fabric
from loong.fabric.world import World
from loong.kernels import attend
from loong.model.cuda_device import CudaDevice
from loong.model.device import CpuDevice, Device
from loong.model.tiny import CONFIG
from loong.worker.kv.pool import KVPool

GROUP = (0, 1)
NUM_HEADS, NUM_KV_HEADS = 4, 2
SHARP = 3.0  # queries so large that a token attends mainly a few keys: an omission shows


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of histories and chunks, in tokens, and of heads."""

    num_history: int
    num_new: int
    head_dim: int


SMALL = Sizes(num_history=6, num_new=4, head_dim=16)
WITH_TILES = Sizes(num_history=4096, num_new=1024, head_dim=128)  # a library attends whole histories


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of a request, in stripes over `masters`, behind a history in stripes over `holders`."""

    num_history: int
    num_new: int
    holders: tuple[InstanceId, ...]
    masters: tuple[InstanceId, ...]
    transfer: Transfer

    @property
    def num_tokens(self) -> int:
        """Of the history and the chunk."""
        return self.num_history + self.num_new

    def history(self, request_id: RequestId) -> Placement:
        """Return the KV before the step."""
        return striped(request_id, range(self.num_history), self.holders)

    def blocks(self, request_id: RequestId) -> Iterator[QueryBlock]:
        """Yield the blocks of each master."""
        positions = range(self.num_history, self.num_tokens)
        for index, master_id in enumerate(self.masters):
            yield QueryBlock(
                request_id, stripe(positions, index, len(self.masters)), master_id, self.transfer
            )


def steps(sizes: Sizes) -> Iterator[dict[RequestId, Chunk]]:
    """Yield a chunk of every kind alone, and with a decode of either master and KV on either instance.

    Steps whose only master is instance 1 are left out: they mirror others.
    """
    kinds = product(((), (0,), (1,), GROUP), ((0,), GROUP), Transfer)
    for holders, masters, transfer in kinds:
        chunk = Chunk(sizes.num_history if holders else 0, sizes.num_new, holders, masters, transfer)
        yield {"chunk": chunk}
        for held, mastered in product(((0,), (1,)), repeat=2):
            yield {"chunk": chunk, "decode": Chunk(sizes.num_history, 1, held, mastered, Transfer.QUERY)}


class Instance:
    """One instance's part in steps of one layer, over tokens that every instance can make by itself."""

    def __init__(
        self, fabric: SymmetricFabric, instance_id: InstanceId, device: Device, dtype: str, sizes: Sizes
    ) -> None:
        self._fabric, self._instance_id, self._device = fabric, instance_id, device
        self._config = replace(CONFIG, num_layers=1, head_dim=sizes.head_dim, dtype=dtype)
        row = 1, *self._config.kv_layout().row_shape
        self._row = torch.zeros(row, dtype=self._config.torch_dtype, device=device.torch_device)
        self._query = self._row.new_zeros(1, NUM_HEADS, sizes.head_dim)
        load_kernels(device, self._query, self._row)

    def warm_up(self, batch_ids: Iterator[int], sizes: Sizes) -> None:
        """Load what computes, by steps of this instance alone: a GPU stands still for that, others wait."""
        alone = (self._instance_id,)
        self._device.plan_attention(self._query, self._row)
        for chunks in steps(sizes):
            own = {
                name: replace(chunk, holders=alone if chunk.holders else (), masters=alone)
                for name, chunk in chunks.items()
            }
            assert self.is_right(next(batch_ids), own, alone)

    def is_right(
        self,
        batch_id: int,
        chunks: Mapping[RequestId, Chunk],
        group: tuple[InstanceId, ...] = GROUP,
    ) -> bool:
        """Return whether the attention of this instance's rows equals that over all KV in one place."""
        q = {name: SHARP * self._values(0, chunk, NUM_HEADS) for name, chunk in chunks.items()}
        kv = {name: self._values(1, chunk, 2, NUM_KV_HEADS) for name, chunk in chunks.items()}
        step = self._step(chunks, kv, group)
        with self._fabric.batch(batch_id, group) as batch:
            attention = ElasticAttention(step, batch, self._device)
            target, rows = attention.new_kv(0)
            target[rows] = _rows(step, kv)
            found = attention(0, _rows(step, q))
            self._device.wait()
        expected = [_alone(q[b.request_id], kv[b.request_id], b.positions) for b in step.blocks]
        tolerance = TOLERANCES[found.dtype]
        return all(
            torch.allclose(found[step.rows[block]].float(), wanted, rtol=tolerance, atol=tolerance)
            for block, wanted in zip(step.blocks, expected, strict=True)
        )

    def _values(self, seed: int, chunk: Chunk, *shape: int) -> Tensor:
        """Return the same on all instances, of each token of a request."""
        generator = torch.Generator().manual_seed(2 * chunk.num_new + seed)
        values = torch.randn(
            chunk.num_tokens, *shape, self._config.head_dim, generator=generator, device="cpu"
        )
        return values.to(self._device.torch_device, self._config.torch_dtype)

    def _step(
        self,
        chunks: Mapping[RequestId, Chunk],
        kv: Mapping[RequestId, Tensor],
        group: tuple[InstanceId, ...],
    ) -> AttentionStep:
        """Return the step, with histories in a pool that is NaN where nothing is known yet."""
        num_slots = sum(chunk.num_tokens for chunk in chunks.values())
        pool = KVPool(self._config.kv_layout(), num_slots, self._device.torch_device)
        pool.layer(0).fill_(torch.nan)
        placements = {name: chunk.history(name) for name, chunk in chunks.items()}
        for name, placement in placements.items():
            for positions in placement.on(self._instance_id):
                slots = pool.allocate(name, positions).to(self._device.torch_device)
                pool.layer(0)[slots] = kv[name][list(positions)]
        blocks = tuple(block for name, chunk in chunks.items() for block in chunk.blocks(name))
        for block in blocks:
            if block.master_id == self._instance_id:
                pool.allocate(block.request_id, block.positions)
        writes = tuple(KVSegment(block.request_id, block.positions, block.master_id) for block in blocks)
        return AttentionStep(self._instance_id, BatchPlan(ESPGroup(group), blocks, writes), placements, pool)


def _rows(step: AttentionStep, values: Mapping[RequestId, Tensor]) -> Tensor:
    """Return the values of a step's rows."""
    rows = [values[block.request_id][list(block.positions)] for block in step.blocks]
    return torch.cat([next(iter(values.values()))[:0], *rows])


def _alone(q: Tensor, kv: Tensor, positions: Sequence[int]) -> Tensor:
    every = torch.arange(len(kv), device=kv.device)
    own, scale = list(positions), q.shape[-1] ** -0.5
    return attend(q[own], kv[:, 0], kv[:, 1], scale=scale, q_positions=every[own], kv_positions=every).out


def wrong_steps(
    fabric: Fabric, instance_id: InstanceId, tp_rank: int, dtypes: Sequence[str], *numbers: int
) -> list[str]:
    """Return the steps of which this instance's rows are wrong."""
    assert isinstance(fabric, SymmetricFabric)
    is_on_gpu = torch.get_default_device().type == "cuda"
    torch.set_default_device("cpu")
    wrong, batch_ids, sizes = [], count(1), Sizes(*numbers)
    for dtype in dtypes:
        device: Device = CpuDevice()
        if is_on_gpu:
            device = CudaDevice(instance_id % torch.cuda.device_count(), getattr(torch, dtype))
        device.use()
        instance = Instance(fabric, instance_id, device, dtype, sizes)
        if is_on_gpu:
            instance.warm_up(batch_ids, sizes)
        wrong += [f"{dtype}: {c}" for c in steps(sizes) if not instance.is_right(next(batch_ids), c)]
    return wrong


@pytest.mark.parametrize(
    ("carrier", "dtypes", "sizes"),
    [
        (Carrier.ARENAS, ("float32", "bfloat16"), SMALL),
        pytest.param(Carrier.GPU_ARENAS, ("float32", "bfloat16"), SMALL, marks=pytest.mark.multigpu),
        pytest.param(Carrier.GPU_ARENAS, ("bfloat16",), WITH_TILES, marks=pytest.mark.multigpu),
    ],
)
def test_any_step_attends_what_one_instance_with_all_kv_would(
    carrier: Carrier, dtypes: Sequence[str], sizes: Sizes
) -> None:
    given = (dtypes, *astuple(sizes))
    found = run_in_world(wrong_steps, World(2, 1), *given, carrier=carrier, seconds=200.0)
    assert found == [[], []]
