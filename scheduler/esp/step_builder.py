"""Builds one step: requests are added to a group until its time, tokens or room are used up."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from loong.core.cost.cost_model import CostModel
from loong.core.cost.work import InstanceWork, WorkCount
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan
from loong.core.request import RequestView
from loong.scheduler.common.masters import num_stored
from loong.scheduler.common.striping import RequestPart, batch_of, decode_part
from loong.scheduler.esp.chunk_size import ChunkSizer
from loong.scheduler.tuning import MIN_CHUNK_SHARE


@dataclass(slots=True)
class StepBuilder:
    """A batch for `instance_ids`. `free` is their free slots, of which every added request takes some.

    An instance computes at most `max_tokens`. A step that begins a lease of `num_steps` has only decodes. A
    group that `is_fixed` is whole, with or without work for each instance.
    """

    instance_ids: tuple[InstanceId, ...]
    free: dict[InstanceId, int]
    cost_model: CostModel
    max_tokens: int
    num_steps: int = 1
    is_fixed: bool = False
    decodes: list[tuple[RequestView, InstanceId]] = field(default_factory=list)  # with their masters
    shares: list[RequestPart] = field(default_factory=list)  # of prompts
    count: WorkCount = field(init=False)
    ring: ESPGroup = field(init=False)  # all its instances
    _costs: dict[InstanceId, float] = field(default_factory=dict)  # seconds; empty until needed

    def __post_init__(self) -> None:
        self.count = WorkCount(self.instance_ids, is_lease=self.num_steps > 1)
        self.ring = ESPGroup(self.instance_ids)

    @property
    def dop(self) -> int:
        """Return the number of its instances."""
        return len(self.instance_ids)

    @property
    def group(self) -> ESPGroup:
        """Return the instances that take part in it."""
        if self.is_fixed or self.count.has_ring or self.dop == 1:
            return self.ring
        having = tuple(i for i in self.instance_ids if self.count.instances[i].num_attends)
        return ESPGroup(having) if having else self.ring

    @property
    def sizer(self) -> ChunkSizer:
        """Return the sizer of its next chunk."""
        return ChunkSizer(self.ring, self.free, self.count, self.cost_model, self.max_tokens)

    @property
    def seconds(self) -> float:
        """Return the predicted time of the step; of a lease, of each step but its first."""
        return self.cost_model.step_time(self.count.step(self.group, is_first=self.num_steps == 1))

    @property
    def instance_seconds(self) -> dict[InstanceId, float]:
        """Return the predicted busy time of each instance, with the overhead of the group."""
        if not self._costs:
            work = self.count.step(self.ring)
            own = {i: self.cost_model.instance_time(part) for i, part in work.instances.items()}
            binding = self.cost_model.step_time(work) - max(own.values())
            self._costs = {i: binding + seconds for i, seconds in own.items()}
        return self._costs

    @property
    def prompt_speed(self) -> float:
        """Return the prompt tokens that it computes in a second."""
        return sum(share.num_tokens for share in self.shares) / self.seconds

    @property
    def begun_seconds(self) -> float:
        """Return the predicted time of the step with the smallest chunk of one more prompt."""
        least_busy = min(self.instance_ids, key=self.instance_seconds.__getitem__)
        count = self.count.copy()
        count.add_chunk({least_busy: 1}, {}, is_ringed=False)
        return self.cost_model.step_time(count.step(self.ring))

    def plan(self) -> BatchPlan:
        """Return the batch."""
        shares = [decode_part(view, master_id, self.num_steps) for view, master_id in self.decodes]
        return batch_of(self.group, shares + self.shares, self.num_steps, self.seconds)

    def add_decodes(self, masters: Sequence[tuple[RequestView, InstanceId]]) -> None:
        """Add one token a step of each request, at its master."""
        self.decodes += masters
        self._costs = {}
        if self.dop == 1:
            (only_id,) = self.instance_ids
            self.free[only_id] -= num_stored([view for view, _ in masters], self.num_steps)
            self.count.add_lone_decodes([view.placement for view, _ in masters])
            return
        for view, master_id in masters:
            self.free[master_id] -= min(self.num_steps, view.num_remaining_tokens)
            self.count.add_decode(master_id, view.placement)

    def shorten(self, num_steps: int) -> None:
        """Limit the lease to `num_steps` steps."""
        self.num_steps = min(self.num_steps, num_steps)
        self.count.is_lease = self.num_steps > 1

    def striped(
        self, view: RequestView, budget: float, keeper_ids: Collection[InstanceId], min_tokens: int = 0
    ) -> RequestPart | None:
        """Return the next chunk that all instances compute, or None if one has no time left.

        Its KV stays on some of `keeper_ids`.
        """
        if not min_tokens and max(self.instance_seconds.values()) > (1 - MIN_CHUNK_SHARE) * budget:
            return None
        free = {i: num_free if i in keeper_ids else 0 for i, num_free in self.free.items()}
        return replace(self.sizer, free=free).striped(view, budget, min_tokens)

    def add(self, view: RequestView, share: RequestPart | None) -> int:
        """Add a chunk of a prompt, if there is one. Returns the number of its tokens."""
        if share is None:
            return 0
        self.shares.append(share)
        self._costs = {}
        for segment in share.writes:
            self.free[segment.instance_id] -= len(segment.positions)
        self.count.add(share.queries, share.writes, view.placement)
        return share.num_tokens

    @contextmanager
    def borrowing(self, view: RequestView) -> Iterator[bool]:
        """Yield whether there is room for what a request that waits is to read and nobody reads.

        That counts as in use from then on, if a chunk of the request was added.
        """
        before, num_shares = self.free.copy(), len(self.shares)
        for instance_id, num_tokens in view.num_unread_tokens().items():
            if instance_id in self.free:
                self.free[instance_id] -= num_tokens
        yield min(self.free.values()) >= 0
        if len(self.shares) == num_shares:
            self.free = before

    def is_full(self, budget: float) -> bool:
        """Return whether no instance has time left for a chunk that is worth it."""
        return min(self.instance_seconds.values()) > (1 - MIN_CHUNK_SHARE) * budget

    def reading_seconds(self, view: RequestView) -> float:
        """Return the predicted time in which a chunk of a prompt, of any length, reads its history."""
        held = view.placement.tokens_by_instance()
        return self.cost_model.instance_time(InstanceWork(num_keys=max(held.values(), default=0)))
