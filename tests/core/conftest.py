"""A policy that makes any plan that keeps the rules."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from loong.core.instance import ESPGroup, InstanceKind
from loong.core.placement import InstanceId, KVSegment
from loong.core.plan import (
    BatchPlan,
    IterationPlan,
    KVMigration,
    LeaseEnd,
    Preemption,
    QueryBlock,
    Transfer,
)
from loong.core.positions import stripe
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot


@pytest.fixture
def plan_at_random() -> Callable[[Random, Snapshot], IterationPlan]:
    return lambda random, snapshot: RandomPolicy(random, snapshot).plan()


@dataclass
class RandomPolicy:
    """Any plan that keeps the rules."""

    random: Random
    snapshot: Snapshot
    free: dict[InstanceId, int] = field(init=False)

    def plan(self) -> IterationPlan:
        self.free = {i.instance_id: i.kv_free for i in self.snapshot.instances}
        views = [v for v in (*self.snapshot.waiting, *self.snapshot.running) if v.is_plannable]
        self.random.shuffle(views)
        preempted: list[RequestView] = []
        moved: list[KVMigration] = []
        while views and self.random.random() < 0.1:
            preempted.append(views.pop())
            for instance_id, num_tokens in preempted[-1].placement.tokens_by_instance().items():
                self.free[instance_id] += num_tokens
        while views and self.random.random() < 0.3:
            moved += self.migrations(views.pop())
        batches = self.batches(views)
        ends = self.lease_ends()
        return IterationPlan(batches, tuple(moved), tuple(Preemption(v.request_id) for v in preempted), ends)

    def migrations(self, view: RequestView) -> Iterable[KVMigration]:
        for segment in view.placement.segments:
            targets = [i for i in self.free if i != segment.instance_id]
            first, step = self.random.randrange(len(segment.positions)), self.random.randint(1, 3)
            if targets and self.random.random() < 0.7:
                target = self.random.choice(targets)
                if positions := segment.positions[first::step][: self.free[target]]:
                    self.free[target] -= len(positions)
                    yield KVMigration(replace(segment, positions=positions), target)

    def batches(self, views: list[RequestView]) -> tuple[BatchPlan, ...]:
        idle = [i.instance_id for i in self.snapshot.instances if i.is_idle]
        self.random.shuffle(idle)
        cut = self.random.randint(0, len(idle))
        found = (self.batch(tuple(ids), views) for ids in (idle[:cut], idle[cut:]) if ids)
        return tuple(batch for batch in found if batch.queries)

    def batch(self, group: tuple[InstanceId, ...], views: list[RequestView]) -> BatchPlan:
        weighty = [i for i in group if self.snapshot.instance[i].kind is InstanceKind.FULL]
        able = [v for v in views if set(v.placement.instance_ids) <= set(group) and weighty]
        decoding = [v for v in able if v.is_decoding]
        num_steps = self.random.choice((1, 2, 6)) if decoding else 1
        able = decoding if num_steps > 1 else able
        queries: list[QueryBlock] = []
        writes: list[KVSegment] = []
        for view in able[: self.random.randint(1, 4)]:
            blocks = self.blocks(view, weighty, must_decode=num_steps > 1)
            kept = self.writes(view, blocks, group, num_steps)
            if kept is not None:
                views.remove(view)
                queries += blocks
                writes += kept
        return BatchPlan(ESPGroup(group), tuple(queries), tuple(writes), num_steps)

    def blocks(
        self, view: RequestView, weighty: list[InstanceId], must_decode: bool
    ) -> tuple[QueryBlock, ...]:
        transfer = Transfer.QUERY if must_decode else self.random.choice(list(Transfer))
        left = view.num_uncomputed_tokens
        num_tokens = self.random.choice((left, left, self.random.randint(1, left)))
        chunk = range(view.num_computed_tokens, view.num_computed_tokens + num_tokens)
        masters = self.random.sample(weighty, self.random.randint(1, min(len(weighty), num_tokens)))
        return tuple(
            QueryBlock(view.request_id, stripe(chunk, i, len(masters)), master, transfer)
            for i, master in enumerate(masters)
        )

    def writes(
        self, view: RequestView, blocks: tuple[QueryBlock, ...], group: tuple[InstanceId, ...], num_steps: int
    ) -> list[KVSegment] | None:
        """Where the new KV goes, or None if it does not fit."""
        kept: list[KVSegment] = []
        for block in blocks:
            homes, positions = [block.master_id], block.positions
            if num_steps > 1:
                first = positions[0]
                positions = range(first, first + min(num_steps, view.num_remaining_tokens))
            if block.transfer is Transfer.KV:
                homes = self.random.sample(group, self.random.randint(1, min(len(group), len(positions))))
            for index, home in enumerate(homes):
                kept.append(KVSegment(view.request_id, stripe(positions, index, len(homes)), home))
        free = dict(self.free)
        for segment in kept:
            free[segment.instance_id] -= len(segment.positions)
        if min(free.values()) < 0:
            return None
        self.free = free
        return kept

    def lease_ends(self) -> tuple[LeaseEnd, ...]:
        return tuple(
            LeaseEnd(batch.batch_id, self.random.randint(batch.num_steps_taken + 1, batch.last_step))
            for batch in self.snapshot.batches
            if batch.num_steps_taken < batch.last_step and self.random.random() < 0.2
        )
