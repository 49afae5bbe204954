"""The home of each decode: the instance on which it takes its steps, of some instances.

That is where most of its KV is, of these instances, or where fewest tokens are read.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from loong.core.placement import InstanceId, Placement, striped
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import RunningBatch
from loong.scheduler.common.leases import decode_seconds
from loong.scheduler.esp.draft import PlanDraft


@dataclass(frozen=True)
class Homes:
    """The homes of all decodes of a draft, oldest first, of which some are in `leases`."""

    draft: PlanDraft
    leases: tuple[RunningBatch, ...]
    views: tuple[RequestView, ...]

    @cached_property
    def on(self) -> Callable[[tuple[InstanceId, ...]], Mapping[RequestId, InstanceId]]:
        """Return the home of each decode, of these instances.

        Those with KV on none of them go where fewest tokens are read, of the instances with room if any has.
        """
        return cache(self._settled)

    @cached_property
    def step_seconds(self) -> Callable[[tuple[InstanceId, ...]], float]:
        """Return the seconds of a step of the slowest of these homes; 0 if there are no decodes."""
        return cache(lambda instance_ids: max(self.seconds_at(self.on(instance_ids)).values(), default=0.0))

    def seconds_at(self, home: Mapping[RequestId, InstanceId]) -> Mapping[InstanceId, float]:
        """Return the seconds of a step of each home that has decodes."""
        placements = dict[InstanceId, list[Placement]]()
        for view in self.views:
            instance_id = home[view.request_id]
            placement = moved_to(instance_id, view) if view.is_migrating else view.placement
            placements.setdefault(instance_id, []).append(placement)
        cost_model = self.draft.cost_model
        return {i: decode_seconds((i,), its, cost_model) for i, its in placements.items()}

    def num_spare(self, instance_ids: Iterable[InstanceId], views: Iterable[RequestView] = ()) -> int:
        """Return the slots there, free or in leases for steps to come, that these do not need to end."""
        num_needed = sum(view.num_remaining_tokens for view in views)
        return sum(self._num_open[i] for i in instance_ids) - num_needed

    @cached_property
    def _num_open(self) -> Counter[InstanceId]:
        """The slots of each instance, free or in leases for steps to come, but for those of its guests.

        These are prompts with KV there alone, which need room until their ends.
        """
        snapshot = self.draft.snapshot
        num_open = Counter(snapshot.free)
        for batch in self.leases:
            num_open.update(batch.plan.num_stored_tokens)
            for block in batch.plan.queries:
                num_open[block.master_id] -= batch.num_steps_taken
        for view in snapshot.running:
            if not (view.num_output_tokens or view.has_ended) and len(view.placement.instance_ids) == 1:
                reserved = 0 if view.batch_id is None else self._num_reserved(view)
                num_open[view.placement.instance_ids[0]] -= view.num_tokens_to_come - reserved
        return num_open

    def _num_reserved(self, view: RequestView) -> int:
        assert view.batch_id is not None
        return self.draft.snapshot.batch[view.batch_id].plan.num_written_tokens.get(view.request_id, 0)

    def _settled(self, instance_ids: tuple[InstanceId, ...]) -> Mapping[RequestId, InstanceId]:
        home, spare = dict[RequestId, InstanceId](), {i: self._num_open[i] for i in instance_ids}
        num_read, later = dict.fromkeys(instance_ids, 0), list[RequestView]()

        def settle(view: RequestView, instance_id: InstanceId) -> None:
            home[view.request_id] = instance_id
            num_read[instance_id] += view.placement.num_tokens
            spare[instance_id] -= view.num_remaining_tokens

        for view in self.views:
            held = {i: n for i, n in view.placement.tokens_by_instance().items() if i in num_read}
            instance_id = self._fixed.get(view.request_id)
            if instance_id in num_read or held:
                settle(view, instance_id if instance_id in num_read else max(held, key=held.__getitem__))
            else:
                later.append(view)
        for view in later:
            hosts = {self._host[i] for i in view.placement.instance_ids}
            near = [i for i in instance_ids if self._host[i] in hosts] or instance_ids
            able = [i for i in near if spare[i] >= view.num_remaining_tokens] or near
            settle(view, min(able, key=num_read.__getitem__))
        return home

    @cached_property
    def _fixed(self) -> Mapping[RequestId, InstanceId]:
        """The homes of those in leases, and of those whose KV is on its way."""
        leased = {b.request_id: b.master_id for batch in self.leases for b in batch.plan.queries}
        moves = (*self.draft.snapshot.migrations, *self.draft.migrations)
        return leased | {move.segment.owner_id: move.destination_id for move in moves}

    @cached_property
    def _host(self) -> Mapping[InstanceId, int]:
        return {instance.instance_id: instance.host_id for instance in self.draft.snapshot.instances}


def moved_to(instance_id: InstanceId, view: RequestView) -> Placement:
    """Return the placement of all KV of a request on one instance."""
    return striped(view.request_id, range(view.placement.num_tokens), (instance_id,))
