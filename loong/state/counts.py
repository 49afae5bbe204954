"""The counts of a cluster since its start."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from loong.core.attention_tasks import num_retained_tokens
from loong.core.group_changes import GroupChange, group_changes
from loong.core.placement import InstanceId
from loong.core.plan import PreemptionReason
from loong.core.snapshot import ClusterStats, RunningBatch
from loong.state.busy_times import BusyTimes
from loong.state.live_request import LiveRequest


class Counts:
    """Counts by their names in `ClusterStats`, and the times of batches."""

    def __init__(self) -> None:
        self.times = BusyTimes()
        self._by_name: Counter[str] = Counter()
        self._num_batches_by_dop: Counter[int] = Counter()
        self._num_preemptions_by_reason: Counter[PreemptionReason] = Counter()

    @property
    def stats(self) -> ClusterStats:
        """Return the counts as a value."""
        return ClusterStats(
            **self._by_name,
            num_batches_by_dop=dict(self._num_batches_by_dop),
            num_preemptions_by_reason=dict(self._num_preemptions_by_reason),
            busy_seconds=self.times.busy,
            two_prompt_groups_seconds=self.times.two_prompt_groups,
        )

    def add(self, **increments: int) -> None:
        """Add to the counts of these names."""
        for name, increment in increments.items():
            self._by_name[name] += increment

    def add_preemptions(self, reasons: Iterable[PreemptionReason]) -> None:
        """Count preemptions by their reasons."""
        self._num_preemptions_by_reason.update(reasons)

    def add_batch(self, batch: RunningBatch, lives: Iterable[LiveRequest]) -> None:
        """Count a new batch of these requests, which are as they were before it."""
        plan, is_lease, group = batch.plan, batch.plan.num_steps > 1, frozenset(batch.plan.group.instance_ids)
        last_groups = [live.last_group for live in lives if live.last_group is not None]
        changes = group_changes(group, batch.holder_ids, last_groups)
        self._num_batches_by_dop[plan.group.dop] += 1
        self.add(
            num_scale_ups=GroupChange.GREW in changes,
            num_scale_downs=GroupChange.SHRANK in changes,
            num_hand_overs=GroupChange.HANDED_OVER in changes,
            num_retained_tokens=0 if is_lease else num_retained_tokens(plan),
            num_pushed_tokens=sum(len(push.segment.positions) for push in plan.pushes),
            num_served_tokens=_num_tokens_outside(group, lives) if batch.holder_ids else 0,
            num_leases=is_lease,
            num_group_leases=is_lease and plan.group.dop > 1,
            num_multi_master_leases=is_lease and len({block.master_id for block in plan.queries}) > 1,
            num_served_leases=is_lease and bool(batch.holder_ids),
            num_micro_batched_leases=plan.num_micro_batches > 1,
        )


def _num_tokens_outside(group: frozenset[InstanceId], lives: Iterable[LiveRequest]) -> int:
    segments = chain.from_iterable(live.placement.segments for live in lives)
    return sum(len(segment.positions) for segment in segments if segment.instance_id not in group)
