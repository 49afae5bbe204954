"""Any step of a batch that the rules of plans allow, as attention sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from hypothesis import strategies as st

from loong.attention.attention_step import AttentionStep
from loong.core.instance import ESPGroup
from loong.core.kv_layout import KVLayout, row_of_heads
from loong.core.placement import InstanceId, KVSegment, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.positions import dealt, first_of, subtract
from loong.core.request import RequestId
from loong.worker.kv.pool import KVPool

Part = TypeVar("Part", QueryBlock, KVSegment)

NUM_INSTANCES = 4
EVERYONE = range(NUM_INSTANCES)
SMALLEST = KVLayout(1, row_of_heads(1, 1), "float32")


@dataclass(frozen=True)
class GivenStep:
    """A batch of one step, and the KV before it."""

    batch: BatchPlan
    placements: Mapping[RequestId, Placement]

    @property
    def holder_ids(self) -> tuple[InstanceId, ...]:
        """Return the instances outside the group that serve the batch."""
        return self.batch.holder_ids(self.placements.values())

    @property
    def instance_ids(self) -> tuple[InstanceId, ...]:
        """Return all instances with a part in the step."""
        return (*self.batch.group.instance_ids, *self.holder_ids)

    @property
    def known(self) -> dict[RequestId, set[int]]:
        """Return the positions of each request whose KV exists in the step."""
        known = {r: {p for s in self.placements[r].segments for p in s.positions} for r in self.placements}
        for block in self.batch.queries:
            known[block.request_id].update(block.positions)
        return known

    def with_batch(self, **changes: object) -> "GivenStep":
        """Return the step with another group, other queries or other writes."""
        return replace(self, batch=replace(self.batch, **changes))  # type: ignore[arg-type]  # of any field

    def only_for(self, request_id: RequestId) -> "GivenStep":
        """Return the step of one request alone."""
        return GivenStep(self.batch.only_for([request_id]), {request_id: self.placements[request_id]})

    def pool_of(self, instance_id: InstanceId, layout: KVLayout = SMALLEST) -> KVPool:
        """Return an instance's pool with slots for all that it has, and as many others; floats are NaN."""
        num_slots = 2 * sum(map(len, self.known.values()))
        pool = KVPool(layout, num_slots, torch.device("cpu"))
        pool.layer(0).view(torch.uint8).fill_(0xFF)
        nodes = set[KVSegment]()
        for request_id, placement in self.placements.items():
            shared = [segment for segment in placement.shared if segment.instance_id == instance_id]
            for segment in shared:
                if segment not in nodes:
                    nodes.add(segment)
                    pool.allocate(segment.owner_id, segment.positions)
                pool.share(segment.owner_id, request_id, segment.positions)
            for positions in subtract(placement.on(instance_id), *[segment.positions for segment in shared]):
                pool.allocate(request_id, positions)
        return pool

    def on(self, instance_id: InstanceId) -> AttentionStep:
        """Return the step on one instance, whose pool has slots for what it holds and is to store."""
        pool = self.pool_of(instance_id)
        self.allocate_new(instance_id, pool)
        return AttentionStep(instance_id, self.batch, self.placements, pool)

    def allocate_new(self, instance_id: InstanceId, pool: KVPool) -> None:
        """Take slots for new KV, as workers do: also for KV that is attended before it is pushed."""
        passing = [push.passing for push in self.batch.pushes if push.is_attended_in_place]
        for segment in (*self.batch.writes, *passing):
            if segment.instance_id == instance_id:
                pool.allocate(segment.owner_id, segment.positions)


@st.composite
def histories(draw: st.DrawFn, request_id: RequestId, holders: tuple[InstanceId, ...]) -> Placement:
    """Draw KV of some of the first positions of a request, on any of these instances."""
    homes = draw(st.lists(st.none() | st.sampled_from(holders), max_size=12))
    return Placement().adding(
        KVSegment(request_id, range(p, p + 1), home) for p, home in enumerate(homes) if home is not None
    )


@st.composite
def given_steps(
    draw: st.DrawFn,
    transfers: tuple[Transfer, ...] = tuple(Transfer),
    num_members: int | None = None,
    most_requests: int = 3,
) -> GivenStep:
    """Draw a step of some requests, each with its own history, chunk, masters, and places of its new KV."""
    dop = num_members or draw(st.integers(1, NUM_INSTANCES))
    members = tuple(draw(st.permutations(EVERYONE))[:dop])
    queries: list[QueryBlock] = []
    writes: list[KVSegment] = []
    placements: dict[RequestId, Placement] = {}
    for number in range(draw(st.integers(1, most_requests))):
        request_id, transfer = f"r{number}", draw(st.sampled_from(transfers))
        holders = members if transfer is Transfer.KV else tuple(EVERYONE)
        history = placements[request_id] = draw(histories(request_id, holders))
        missing = (*history.holes, range(history.stop, history.stop + 8))
        chunk = first_of(missing, draw(st.integers(1, 8)))
        masters = draw(st.permutations(members))[: draw(st.integers(1, dop))]
        for master_id, pieces in zip(masters, dealt(chunk, len(masters)), strict=True):
            queries += [QueryBlock(request_id, positions, master_id, transfer) for positions in pieces]
        if transfer is Transfer.KV:
            keepers = draw(st.permutations(EVERYONE))[: draw(st.integers(1, NUM_INSTANCES))]
            kept = zip(keepers, dealt(chunk, len(keepers)), strict=True)
            writes += [KVSegment(request_id, positions, i) for i, pieces in kept for positions in pieces]
        else:
            writes += draw(_stored_by_masters(queries, request_id, members))
    batch = BatchPlan(ESPGroup(members), tuple(draw(st.permutations(queries))), tuple(writes))
    return GivenStep(batch, placements)


@st.composite
def sharing_steps(draw: st.DrawFn, transfers: tuple[Transfer, ...] = tuple(Transfer)) -> GivenStep:
    """Draw a step as `given_steps`, of requests behind paths of a tree whose nodes they share."""
    step = draw(given_steps(transfers, most_requests=5))
    holders = step.batch.group.instance_ids
    if transfers == (Transfer.QUERY,):
        holders = tuple(EVERYONE)
    size, nodes = draw(st.integers(1, 4)), dict[str, tuple[KVSegment, ...]]()
    placements, shifts = {}, {}
    for request_id, placement in step.placements.items():
        path = draw(st.text("ab", max_size=3))
        for depth in range(len(path)):
            if (node := path[: depth + 1]) not in nodes:
                homes = draw(st.lists(st.sampled_from(holders), min_size=size, max_size=size))
                held = enumerate(homes, start=depth * size)
                whole = Placement().adding(KVSegment(node, range(p, p + 1), home) for p, home in held)
                nodes[node] = whole.segments
        shared = tuple([segment for depth in range(len(path)) for segment in nodes[path[: depth + 1]]])
        shifts[request_id] = len(path) * size
        placements[request_id] = (
            Placement()
            .adding(segment._replace(owner_id=request_id) for segment in shared)
            .adding(_later(segment, shifts[request_id]) for segment in placement.segments)
            .sharing(shared)
        )
    queries = tuple([_later(block, shifts[block.request_id]) for block in step.batch.queries])
    writes = tuple([_later(segment, shifts[segment.owner_id]) for segment in step.batch.writes])
    return GivenStep(replace(step.batch, queries=queries, writes=writes), placements)


def _later(part: Part, number: int) -> Part:
    """Return a block or a segment at positions higher by a number."""
    start, stop, step = part.positions.start, part.positions.stop, part.positions.step
    return part._replace(positions=range(start + number, stop + number, step))


@st.composite
def _stored_by_masters(
    draw: st.DrawFn, queries: list[QueryBlock], request_id: RequestId, members: tuple[InstanceId, ...]
) -> list[KVSegment]:
    """Draw where KV whose queries travel is stored: each stripe at its master, or outside the group."""
    stored: list[KVSegment] = []
    for block in queries:
        keepers = st.sampled_from((block.master_id, *(i for i in EVERYONE if i not in members)))
        if block.request_id == request_id:
            num_stripes = draw(st.integers(1, 3))
            stripes = [block.positions[n::num_stripes] for n in range(num_stripes)]
            stored += [KVSegment(request_id, p, draw(keepers)) for p in stripes if p]
    return stored
