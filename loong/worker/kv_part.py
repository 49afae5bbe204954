"""The part of a worker that needs no weights: KV that is kept, moved, and attended for others."""

from collections.abc import Iterator

import torch

from loong.core.errors import ClusterError
from loong.core.instance import Service
from loong.core.instructions import MoveKV, ReleaseKV, ReleaseWindows, RunBatch, ShareKV
from loong.core.kv_layout import KVLayout
from loong.core.placement import InstanceId, OwnerId
from loong.fabric.protocol import Fabric
from loong.model.tensor_parallel import Shard
from loong.worker.backend import Backend
from loong.worker.config import WorkerConfig
from loong.worker.kv.pool import KVPool
from loong.worker.service import AttentionService
from loong.worker.steps.served_leases import ServedLeases
from loong.worker.tracer import Span
from loong.worker.transfer import SegmentMover


class KVPart:
    """The pools of an instance and of its host tier, with what serves and moves their KV.

    Calls come from the threads of a worker. An instance without weights is this part alone.
    """

    def __init__(self, config: WorkerConfig, shard: Shard, fabric: Fabric, backend: Backend) -> None:
        self._instance_id = config.instance_id
        self._pools = _pools_of(config, shard.kv_layout, backend.device.torch_device)
        self._mover = SegmentMover(config, self._pools, fabric)
        self._service: AttentionService | None = None
        if backend.serves is not Service.NONE:
            self._service = AttentionService(self._instance_id, shard, self.pool, fabric, backend)

    @property
    def pool(self) -> KVPool:
        """Return the pool of the instance itself, on its device."""
        return self._pools[self._instance_id]

    def warm_up(self, leases: ServedLeases | None) -> None:
        """Prepare to serve. `leases` are the captured steps of this instance, if there are any."""
        if self._service is not None:
            self._service.warm_up(leases)

    def begin_serving(self, command: RunBatch) -> None:
        """Begin to serve a batch of a group without this instance. Raises ClusterError if that cannot be."""
        if self._service is None:
            raise ClusterError(
                f"instance {self._instance_id} is to serve batch {command.batch_id}, but its device cannot"
            )
        self._service.begin(command)

    def wait_for(self, owner_id: OwnerId) -> None:
        """Return once a request is not served here, see `AttentionService.wait_for`."""
        if self._service is not None:
            self._service.wait_for(owner_id)

    def release(self, command: ReleaseKV) -> None:
        """Release an owner's slots in the pools that are here."""
        for instance_id in command.instance_ids:
            pool = self._pools.get(instance_id)
            if pool is not None and command.positions is None:
                pool.release(command.owner_id)
            elif pool is not None and command.positions is not None:
                pool.release_positions([(command.owner_id, command.positions)])

    def release_windows(self, command: ReleaseWindows) -> None:
        """Drop KV of layers with a window in the pools that are here."""
        for instance_id in command.instance_ids:
            if (pool := self._pools.get(instance_id)) is not None:
                pool.release_windows(command.owner_id, command.positions)

    def share(self, command: ShareKV) -> None:
        """Let a user have slots of other owners in the pools that are here, too."""
        for owner_id, positions, instance_id in command.segments:
            if (pool := self._pools.get(instance_id)) is not None:
                pool.share(owner_id, command.user_id, positions)

    def move(self, command: MoveKV) -> bool:
        """Carry out this worker's part of a migration; see `SegmentMover.move`."""
        return self._mover.move(command)

    def spans(self) -> Iterator[Span]:
        """Yield the spans of a trace: an object, its method and its name."""
        yield self._mover, "move", "migration"
        if self._service is not None:
            yield from self._service.spans()


def _pools_of(config: WorkerConfig, layout: KVLayout, device: torch.device) -> dict[InstanceId, KVPool]:
    """Return the pools of a process by instance: one on its device, and one in memory of the host."""
    pool = KVPool(
        layout,
        config.kv_capacity,
        device,
        is_mapped=config.lends,
        lent=config.lent,
        num_window_slots=config.window_kv_capacity or None,
    )
    pools = {config.instance_id: pool}
    if config.host_kv_capacity:
        is_pinned = device.type == "cuda"
        host = KVPool(layout, config.host_kv_capacity, torch.device("cpu"), is_pinned=is_pinned)
        pools[config.own_tier_id] = host
    return pools
