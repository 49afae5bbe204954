"""Migrations: KV that is not in flight goes to another pool, while batches of other requests run."""

from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from loong.core.errors import ClusterError, InvalidPlanError
from loong.core.instructions import MoveKV
from loong.core.placement import InstanceId
from loong.fabric.protocol import Fabric, Pending
from loong.worker.config import WorkerConfig
from loong.worker.kv.pool import KVPool

_TOKENS_PER_MESSAGE = 1024


class SegmentMover:
    """This worker's part in migrations between its own pools (by instance id) and those of others.

    The destination takes slots first and copies into them; neither end frees anything. An end that fails
    notifies the other, so both are soon done. The engine then releases the source's slots, or the
    destination's if either failed.
    """

    def __init__(self, config: WorkerConfig, pools: Mapping[InstanceId, KVPool], fabric: Fabric) -> None:
        self._config, self._pools, self._fabric = config, pools, fabric

    def move(self, command: MoveKV) -> bool:
        """Carry out this worker's part.

        Returns whether it succeeded: there was room, and the other end was there.
        """
        migration = command.migration
        source = self._pools.get(migration.segment.instance_id)
        destination = self._pools.get(migration.destination_id)
        try:
            if source is not None and destination is not None:
                self._copy(command, source, destination)
            elif source is not None:
                self._send(command, source)
            elif destination is not None:
                self._receive(command, destination)
        except (ClusterError, InvalidPlanError):
            return False
        return True

    def _copy(self, command: MoveKV, source: KVPool, destination: KVPool) -> None:
        owner_id, positions = command.migration.segment.owner_id, command.migration.segment.positions
        to_slots = destination.allocate(owner_id, positions, windowless=command.windowless)
        from_slots = source.slots(owner_id, positions)
        pieces = (torch.split(slots, _TOKENS_PER_MESSAGE) for slots in (to_slots, from_slots))
        for to_piece, from_piece in zip(*pieces, strict=True):
            destination.scatter(to_piece, source.gather(from_piece))

    def _send(self, command: MoveKV, pool: KVPool) -> None:
        segment, peer_id = command.migration.segment, self._config.home_of(command.migration.destination_id)
        with self._fabric.migration(command.migration_id, peer_id) as opened:
            in_flight: deque[Pending] = deque()
            slots = pool.slots(segment.owner_id, segment.positions).to(pool.device)
            for piece in torch.split(slots, _TOKENS_PER_MESSAGE):
                kv = pool.gather(piece)
                in_flight.append(opened.send(kv))
                if len(in_flight) > 1:  # the next is gathered while one is on its way
                    in_flight.popleft().wait()
            for pending in in_flight:
                pending.wait()

    def _receive(self, command: MoveKV, pool: KVPool) -> None:
        segment = command.migration.segment
        peer_id = self._config.home_of(segment.instance_id)
        with self._fabric.migration(command.migration_id, peer_id) as opened:
            slots = pool.allocate(segment.owner_id, segment.positions, windowless=command.windowless)
            slots = slots.to(pool.device)
            in_flight: deque[tuple[Tensor, Tensor, Pending]] = deque()
            for piece in torch.split(slots, _TOKENS_PER_MESSAGE):
                kv = pool.empty_rows(len(piece))
                in_flight.append((piece, kv, opened.receive(kv)))
                if len(in_flight) > 1:  # the next comes while one is stored
                    _store(pool, *in_flight.popleft())
            for arriving in in_flight:
                _store(pool, *arriving)


def _store(pool: KVPool, slots: Tensor, kv: Tensor, pending: Pending) -> None:
    pending.wait()
    pool.scatter(slots, kv)
