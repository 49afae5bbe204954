"""A micro-batch of a lease whose layers are computed on members in turn, as every instance sees it.

Slice k of micro-batch j, up to attention of layer k, is computed on member (j + k) mod DoP (Lamina, 5.1.1).
That member sends queries where KV is, and new KV to the masters of its requests, which store it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from torch import Tensor

from loong.attention.attention_step import AttentionStep, concatenate, within
from loong.attention.exchange import QueryExchange
from loong.attention.remote import QueryLayout, query_layout
from loong.core.attention_tasks import sees
from loong.core.placement import InstanceId, KVSegment
from loong.core.plan import QueryBlock
from loong.core.positions import coalesce
from loong.core.request import RequestId
from loong.fabric.protocol import Exchanging
from loong.model.device import Device

Exchanges: TypeAlias = Mapping[tuple[InstanceId | None, int | None], tuple[QueryLayout, QueryExchange]]
"""The part of an instance in a micro-batch, by the member that asks (None: masters) and by window."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The products of micro-batch `part` from attention of layer `index` - 1 to that of layer `index`."""

    part: int
    index: int
    member: int  # its place in the group


def slices_of(num_layers: int, dop: int) -> Iterator[Slice]:
    """Yield all slices of a step in the order in which they begin; the last of each part ends its layers.

    The one at place t is computed by member t mod `dop`.
    """
    for index in range(num_layers + 1):
        for part in range(dop + 1):
            yield Slice(part, index, (part + index) % dop)


class RotatedStep(AttentionStep):
    """A micro-batch while some member computes a slice: queries come from there, new KV is at masters.

    `placements` have the new KV already.
    """

    @property
    def stored_blocks(self) -> Sequence[QueryBlock]:
        """See `AttentionStep`: masters store the new KV when it comes."""
        return ()

    @cached_property
    def _meetings(self) -> frozenset[tuple[QueryBlock, InstanceId]]:
        return frozenset(
            (block, segment.instance_id)
            for block in self.batch.queries
            for segment in self.placements[block.request_id].segments
            if sees(block.positions, segment.positions, self.window)
        )

    def keys_of(self, request_id: RequestId) -> tuple[range, ...]:
        """See `AttentionStep`."""
        first = self.batch.blocks_of(request_id)[0].positions[0]
        return within(self.window, first, coalesce(self.placements[request_id].on(self.instance_id)))


def rows_of_masters(step: AttentionStep) -> Mapping[InstanceId, list[int]]:
    """Return the rows of each master's requests, of all rows of a micro-batch."""
    found: dict[InstanceId, list[int]] = {}
    for row, block in enumerate(step.batch.queries):
        found.setdefault(block.master_id, []).append(row)
    return found


def new_slots(step: AttentionStep) -> Tensor:
    """Return the slots [n] int64, on the host, of the new KV that this instance stores as a master."""
    return concatenate(step.slots(block.request_id, (block.positions,)) for block in step.blocks)


def exchanges(step: AttentionStep, batch: Exchanging, device: Device) -> Exchanges:
    """Return what an instance does for a micro-batch whose masters compute all layers."""
    return _by_window(step, None, batch, device)


def rotated_exchanges(step: AttentionStep, batch: Exchanging, device: Device) -> Exchanges:
    """Return what an instance does for a micro-batch, whichever member of the group computes a layer."""
    plan = step.batch
    placements = {
        block.request_id: step.placements[block.request_id].adding(
            [KVSegment(block.request_id, block.positions, block.master_id)]
        )
        for block in plan.queries
    }
    found = dict[tuple[InstanceId | None, int | None], tuple[QueryLayout, QueryExchange]]()
    for member_id in plan.group.instance_ids:
        queries = tuple(block._replace(master_id=member_id) for block in plan.queries)
        rotated = RotatedStep(
            step.instance_id, replace(plan, queries=queries), placements, step.store, least_saved=None
        )
        found.update(_by_window(rotated, member_id, batch, device))
    return found


def _by_window(
    step: AttentionStep, member_id: InstanceId | None, batch: Exchanging, device: Device
) -> Exchanges:
    found = {}
    for window, its in step.by_window().items():
        layout = query_layout(its, device)
        found[member_id, window] = layout, QueryExchange(batch, device, layout.routing)
    return found
