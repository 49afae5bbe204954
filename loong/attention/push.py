"""New KV that instances outside the group store, sent layer by layer."""

from collections.abc import Mapping

import torch
from torch import Tensor

from loong.attention.attention_step import AttentionStep, concatenate, row_range
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan
from loong.fabric.protocol import Exchanging, Pending
from loong.fabric.traffic import Channel
from loong.model.device import Device


class OutgoingPushes:
    """The KV that this instance pushes in a step, by holder."""

    def __init__(self, step: AttentionStep, batch: Exchanging, device: Device) -> None:
        rows: dict[InstanceId, list[Tensor]] = {}
        for push in step.batch.pushes:
            if push.block.master_id == step.instance_id:
                positions, pushed = push.block.positions, push.segment.positions
                first, stride = positions.index(pushed[0]), pushed.step // positions.step
                chosen = row_range(step.rows[push.block])[first :: max(1, stride)][: len(pushed)]
                rows.setdefault(push.segment.instance_id, []).append(chosen)
        self._rows = {holder_id: device.upload(concatenate(pieces)) for holder_id, pieces in rows.items()}
        self._batch = batch

    def send(self, kv: Tensor, places: Tensor) -> Pending | None:
        """Send the new KV of a layer, from rows `places` [T] of kv [n, ...]; return None if none is
        sent.
        """
        if not self._rows:
            return None
        outgoing = {holder_id: kv[places[rows]] for holder_id, rows in self._rows.items()}
        return self._batch.exchange(outgoing, {}, Channel.RING)


class IncomingPushes:
    """The KV of a step that a holder outside the group stores, by the instance that makes it."""

    def __init__(self, step: AttentionStep, members: Exchanging, device: Device) -> None:
        self._slots = {window: _incoming_slots(its, device) for window, its in step.by_window().items()}
        self._members, self._device = members, device

    @property
    def is_empty(self) -> bool:
        """Return whether the holder receives no KV."""
        return not any(self._slots.values())

    def store(self, pool: Tensor, window: int | None = None) -> None:
        """Wait for the new KV of a layer with that window, and write it into the layer's pool [S, ...]."""
        slots_of = self._slots[window]
        incoming = {i: pool.new_empty(len(slots), *pool.shape[1:]) for i, slots in slots_of.items()}
        self._members.exchange({}, incoming, Channel.RING).wait()
        for source_id, kv in incoming.items():
            self._device.copy_rows(kv, pool, source_rows=None, target_rows=slots_of[source_id])

    def confirm(self) -> None:
        """Confirm to the senders that all KV is stored."""
        done = torch.ones(1, dtype=torch.int64)
        source_ids = next(iter(self._slots.values()))
        self._members.exchange(dict.fromkeys(source_ids, done), {}, Channel.CONTROL).wait()


def _incoming_slots(step: AttentionStep, device: Device) -> Mapping[InstanceId, Tensor]:
    slots: dict[InstanceId, list[Tensor]] = {}
    for push in step.batch.pushes:
        if push.segment.instance_id == step.instance_id:
            its_slots = step.slots(push.block.request_id, (push.segment.positions,))
            slots.setdefault(push.block.master_id, []).append(its_slots)
    return {source_id: device.upload(concatenate(pieces)) for source_id, pieces in slots.items()}


def await_stored(batch: Exchanging, plan: BatchPlan, instance_id: InstanceId) -> None:
    """Wait until all KV that an instance has pushed is stored. A batch does not end before."""
    holder_ids = {p.segment.instance_id for p in plan.pushes if p.block.master_id == instance_id}
    confirmed = {holder_id: torch.empty(1, dtype=torch.int64) for holder_id in holder_ids}
    batch.exchange({}, confirmed, Channel.CONTROL).wait()
