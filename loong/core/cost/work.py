"""Counts of the work that a step gives each instance, from which a cost model predicts seconds."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import InitVar, dataclass, field, fields, replace
from enum import StrEnum
from operator import attrgetter

from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId, KVSegment, OwnerId, Placement, tokens_by_instance
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.positions import num_ordered_pairs
from loong.core.request import RequestId
from loong.core.shared_kv import LEAST_ALONE
from loong.core.value import value


@dataclass(slots=True)
class InstanceWork:
    """The part of one instance in one step. Tokens are the unit where no other is named.

    A query meets a key in a pair; pairs that the mask removes are not counted. Keys that single queries meet
    (decode) are apart, because attention is bound by reading there and by computing elsewhere.
    """

    num_requests: int = 0  # of the batch: every instance of the group processes the inputs of all
    num_segments: int = 0  # of their KV before the step; every instance processes all
    num_tokens: int = 0  # computed as a master, from embedding to output
    num_blocks: int = 0  # query blocks that it is master of
    num_ring_blocks: int = 0  # of these, to which KV travels
    num_prompt_blocks: int = 0  # longer ones, of all masters, that it attends where no KV travels
    num_attends: int = 0  # attention calls, a layer
    num_decode_keys: int = 0  # read for single queries
    num_keys: int = 0  # read for longer blocks
    num_pairs: float = 0.0  # computed for longer blocks
    num_part_pairs: float = 0.0  # of these, with keys that the instance does not compute itself in the step
    num_ring_keys: int = 0  # keys and values received round the ring, or pushed from a group by its masters
    num_hops: int = 0  # blocks of these, a layer
    num_sent_queries: int = (
        0  # queries that go to another instance, and come back as partials; see `StepWork`
    )
    num_kept_keys: int = 0  # keys and values kept that another instance made (retention)
    num_relayed_keys: int = 0  # met by single queries while they are read for others, in one pass
    num_relayed_prompt_keys: int = 0  # met by longer blocks while they are read for others
    num_relayed_queries: int = 0  # the queries of both

    def copy(self) -> "InstanceWork":
        """Return a copy to which other work can be added."""
        return InstanceWork(*_counts(self))

    def share(self, number: int) -> "InstanceWork":
        """Return one of `number` equal parts of the work, rounded up."""
        return InstanceWork(*(-(-count // number) for count in _counts(self)))

    @classmethod
    def together(cls, works: Collection["InstanceWork"]) -> "InstanceWork":
        """Return the work of several members of a group as that of one."""
        found = cls(*map(sum, zip(*map(_counts, works), strict=True)))
        found.num_requests = max(work.num_requests for work in works)
        found.num_segments = max(work.num_segments for work in works)
        return found


_counts = attrgetter(*(count.name for count in fields(InstanceWork)))


class Phase(StrEnum):
    """The kind of queries in a step: chunks of prompts, single tokens after all others, or both."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@value
class StepWork:
    """One step of a group: the work of each of its instances, and the facts that concern the whole group.

    A batch is sent to the group with its first step, before which some instances may have been idle
    (`starts_idle`). After each step of a lease its members agree on whether it continues. `holders` are the
    instances outside the group that serve it, each with its attention for members and the queries that it
    answers. Those in `idle_holder_ids` run no batch of their own. `read_shares` are the shares of time in
    which holders read for other groups. Products of `num_micro_batches` alternate with served attention. If
    the step `rotates`, members compute layers of all micro-batches in turn.
    """

    group: ESPGroup
    instances: Mapping[InstanceId, InstanceWork]
    has_ring: bool
    has_exchange: bool
    is_first: bool = True
    is_lease: bool = False
    starts_idle: bool = False
    holders: Mapping[InstanceId, InstanceWork] = field(default_factory=dict)
    idle_holder_ids: frozenset[InstanceId] = frozenset()
    read_shares: Mapping[InstanceId, float] = field(default_factory=dict)
    num_micro_batches: int = 1
    rotates: bool = False

    @property
    def phase(self) -> Phase:
        """Return the kind of its queries."""
        return phase_of(self.instances.values())

    @property
    def num_requests(self) -> int:
        """Return the number of requests of the step."""
        return self.instances[self.group.leader_id].num_requests


def phase_of(works: Iterable[InstanceWork]) -> Phase:
    """Return the kind of the queries of these instances; DECODE if there are none."""
    has_decode = has_prefill = False
    for work in works:
        has_decode |= work.num_decode_keys > 0
        has_prefill |= work.num_keys > 0
    return phase_with(has_prefill, has_decode)


def phase_with(has_prefill: bool, has_decode: bool) -> Phase:
    """Return the phase of queries that are longer blocks, single ones, or both; DECODE if neither."""
    if has_prefill:
        return Phase.MIXED if has_decode else Phase.PREFILL
    return Phase.DECODE


@dataclass(slots=True)
class WorkCount:
    """Counts the work of a step, request by request; `is_lease` if it is the first of many."""

    instance_ids: InitVar[Iterable[InstanceId]]
    is_lease: bool = False
    num_requests: int = 0
    num_segments: int = 0
    has_ring: bool = False
    has_exchange: bool = False
    instances: dict[InstanceId, InstanceWork] = field(init=False)
    holders: dict[InstanceId, InstanceWork] = field(default_factory=dict)  # no members of the group
    read: dict[tuple[OwnerId, InstanceId], int] = field(default_factory=dict)  # shared keys, counted once
    ringed: dict[tuple[OwnerId, InstanceId], int] = field(default_factory=dict)  # of keys that travel

    def __post_init__(self, instance_ids: Iterable[InstanceId]) -> None:
        self.instances = {instance_id: InstanceWork() for instance_id in instance_ids}

    def add(
        self, blocks: tuple[QueryBlock, ...], writes: tuple[KVSegment, ...], placement: Placement
    ) -> None:
        """Count one more request, given its KV before the step."""
        is_ringed = blocks[0].transfer is Transfer.KV and len(self.instances) > 1
        has_holes = placement.has_holes
        if not (is_ringed or has_holes) and len(blocks) == 1 and len(blocks[0].positions) == 1:
            self.add_decode(blocks[0].master_id, placement)
            return
        made: Counter[InstanceId] = Counter()
        for block in blocks:
            made[block.master_id] += len(block.positions)
        earlier_share = _earlier_share(blocks, placement) if has_holes else 1.0
        self.add_chunk(made, placement.tokens_by_instance(), is_ringed=is_ringed, earlier_share=earlier_share)
        if placement.shared and is_ringed:
            self._relay_ring(placement.shared, made)
        elif placement.shared and made.total() < LEAST_ALONE:
            self._relay_chunk(placement.shared, made.total())
        _add_kept(self, made, writes)
        self.num_segments += len(placement.segments)

    def add_chunk(
        self,
        made: Mapping[InstanceId, int],
        held: Mapping[InstanceId, int],
        *,
        is_ringed: bool,
        earlier_share: float = 1.0,
    ) -> None:
        """Count a chunk of a prompt, given the tokens that each master computes and each instance holds.

        Its KV travels if it `is_ringed`, else its queries do. Of the pairs with KV from before the step,
        `earlier_share` have a key before the query. The mask removes the others.
        """
        if is_ringed:
            _add_ring(self.instances, made, held, earlier_share)
            self.has_ring = True
        else:
            self.has_exchange |= _add_exchange(self, made, held, earlier_share)
        self.num_requests += 1

    def add_decode(self, master_id: InstanceId, placement: Placement) -> None:
        """Count one token that its master stores, and that attends its history where that is stored."""
        segments, master = placement.segments, self.instances[master_id]
        master.num_tokens += 1
        master.num_blocks += 1
        master.num_attends += 1
        if len(segments) == 1 and segments[0].instance_id == master_id:
            master.num_decode_keys += 1 + len(segments[0].positions)
        else:
            master.num_decode_keys += 1
            self.has_exchange |= _add_history(self, master_id, placement.tokens_by_instance())
        if placement.shared:
            self._relay(placement.shared)
        self.num_requests += 1
        self.num_segments += len(segments)

    def move_decode(self, master_id: InstanceId, placement: Placement) -> None:
        """Count a token, which is counted with this history, as if its master had all of that history.

        Keys that other queries read too are still read where they are.
        """
        master = self.instances[master_id]
        shared = tokens_by_instance(placement.shared)
        for instance_id, num_keys in placement.tokens_by_instance().items():
            if instance_id != master_id:
                work = self.at(instance_id)
                work.num_attends -= 1
                work.num_decode_keys -= num_keys - shared[instance_id]
                self.answer(instance_id, -1)
                if instance_id in self.holders and not work.num_attends:
                    del self.holders[instance_id]
                master.num_decode_keys += num_keys
                master.num_sent_queries -= 1
        self.num_segments -= len(placement.segments) - 1
        self.has_exchange = any(work.num_sent_queries for work in self.instances.values())

    def add_lone_decodes(self, placements: Sequence[Placement]) -> None:
        """Count one token of each request, with its whole history, on the only instance."""
        (work,) = self.instances.values()
        num_decodes = len(placements)
        work.num_tokens += num_decodes
        work.num_blocks += num_decodes
        work.num_attends += num_decodes
        work.num_decode_keys += num_decodes + sum([placement.num_tokens for placement in placements])
        for placement in placements:
            if placement.shared:
                self._relay(placement.shared)
        self.num_requests += num_decodes
        self.num_segments += sum([len(placement.segments) for placement in placements])

    def copy(self, instance_ids: Iterable[InstanceId] | None = None) -> "WorkCount":
        """Return one to which other requests can be added: of all its instances, or of these alone."""
        other = copy(self)
        other.read, other.ringed = self.read.copy(), self.ringed.copy()
        other.holders = {instance_id: work.copy() for instance_id, work in self.holders.items()}
        ids = self.instances if instance_ids is None else instance_ids
        other.instances = {instance_id: self.instances[instance_id].copy() for instance_id in ids}
        return other

    def step(self, group: ESPGroup, is_first: bool = True) -> StepWork:
        """Return the work of a step for a group with all instances that take part in it."""
        instances = {instance_id: self.instances[instance_id] for instance_id in group.instance_ids}
        for work in (*instances.values(), *self.holders.values()):
            work.num_requests = self.num_requests
            work.num_segments = self.num_segments
        return StepWork(
            group,
            instances,
            self.has_ring,
            self.has_exchange,
            is_first,
            self.is_lease,
            holders=self.holders,
        )

    def _relay(self, shared: Iterable[KVSegment]) -> None:
        """Count keys of a single query, which are counted, as read before if another query reads them."""
        for (_, instance_id), num_relayed in _known(self.read, shared):
            work = self.at(instance_id)
            work.num_decode_keys -= num_relayed
            work.num_relayed_keys += num_relayed
            work.num_relayed_queries += 1

    def _relay_chunk(self, shared: Iterable[KVSegment], num_queries: int) -> None:
        """Count keys of a chunk of few queries, which are counted, as read before if others read them."""
        for (_, instance_id), num_relayed in _known(self.read, shared):
            _relay_prompt(self.at(instance_id), num_relayed, num_queries)

    def _relay_ring(self, shared: Iterable[KVSegment], made: Mapping[InstanceId, int]) -> None:
        """Count keys that travel, which are counted, as those of another request if that has them too."""
        for (_, source_id), num_relayed in _known(self.ringed, shared):
            for instance_id, work in self.instances.items():
                if instance_id != source_id:
                    work.num_ring_keys -= num_relayed
                if made.get(instance_id):
                    _relay_prompt(work, num_relayed, made[instance_id])

    def at(self, instance_id: InstanceId) -> InstanceWork:
        """Return the work of a member, or of a holder outside the group."""
        work = self.instances.get(instance_id) or self.holders.get(instance_id)
        if work is None:
            work = self.holders[instance_id] = InstanceWork()
        return work

    def answer(self, instance_id: InstanceId, num_queries: int) -> None:
        """Count queries of members that an instance answers, unless it is a member too."""
        if instance_id not in self.instances:
            self.holders[instance_id].num_sent_queries += num_queries


def step_work(batch: BatchPlan, placements: Mapping[RequestId, Placement], is_first: bool = True) -> StepWork:
    """Return the work of a step of a batch, its first or a later one, given the KV before that step."""
    count = WorkCount(batch.group.instance_ids, is_lease=batch.num_steps > 1)
    for request_id in batch.request_ids:
        count.add(batch.blocks_of(request_id), batch.writes_of(request_id), placements[request_id])
    work = count.step(batch.group, is_first)
    if batch.num_micro_batches == 1:
        return work
    return replace(work, num_micro_batches=batch.num_micro_batches, rotates=batch.rotates)


def batch_work(
    batch: BatchPlan,
    placements: Mapping[RequestId, Placement],
    num_steps: int,
    *,
    starts_idle: bool = False,
) -> tuple[tuple[StepWork, int], ...]:
    """Return the work of `num_steps` steps of a batch, with the number of equal steps of each kind.

    It takes the KV before the first step. A lease is counted as its first step, and the middle one of the
    others as often as there are others.
    """
    first = replace(step_work(batch, placements), starts_idle=starts_idle)
    if num_steps == 1:
        return ((first, 1),)
    grown = {
        request_id: placements[request_id].adding(
            KVSegment(request_id, segment.positions[: num_steps // 2], segment.instance_id)
            for segment in batch.writes_of(request_id)
        )
        for request_id in batch.request_ids
    }
    return (first, 1), (step_work(batch, grown, is_first=False), num_steps - 1)


def _add_history(count: WorkCount, master_id: InstanceId, held: Mapping[InstanceId, int]) -> bool:
    """Count a single query that attends its history, and whether part of that is not at its master."""
    num_remote = 0
    for instance_id, num_keys in held.items():
        work = count.at(instance_id)
        work.num_decode_keys += num_keys
        if instance_id != master_id:
            work.num_attends += 1
            count.answer(instance_id, 1)
            num_remote += 1
    count.instances[master_id].num_sent_queries += num_remote
    return num_remote > 0


def _add_ring(
    instances: Mapping[InstanceId, InstanceWork],
    made: Mapping[InstanceId, int],
    held: Mapping[InstanceId, int],
    earlier_share: float,
) -> None:
    """Count KV that passes every instance; a master's query attends half of the chunk's keys on average."""
    num_new, num_cached = sum(made.values()), sum(held.values())
    num_holders = len(made.keys() | held.keys())
    for instance_id, work in instances.items():
        num_queries = made.get(instance_id, 0)
        work.num_hops = len(instances) - 1
        work.num_ring_keys += num_new + num_cached - num_queries - held.get(instance_id, 0)
        if num_queries:
            work.num_tokens += num_queries
            work.num_blocks += 1
            work.num_ring_blocks += 1
            work.num_attends += num_holders
            work.num_keys += num_new + num_cached
            num_pairs = num_queries * (earlier_share * num_cached + (num_new + 1) / 2)
            work.num_pairs += num_pairs
            work.num_part_pairs += num_pairs - num_queries * (num_queries + 1) / 2


def _known(
    read: dict[tuple[OwnerId, InstanceId], int], shared: Iterable[KVSegment]
) -> list[tuple[tuple[OwnerId, InstanceId], int]]:
    """Return the shared keys of a request that are `read` already, by their place, and add the others.

    Of an owner, requests read the same first keys.
    """
    parts: Counter[tuple[OwnerId, InstanceId]] = Counter()
    for owner_id, positions, instance_id in shared:
        parts[owner_id, instance_id] += len(positions)
    found = []
    for place, num_keys in parts.items():
        known = read.get(place, 0)
        if known:
            found.append((place, min(num_keys, known)))
        read[place] = max(num_keys, known)
    return found


def _relay_prompt(work: InstanceWork, num_relayed: int, num_queries: int) -> None:
    """Count keys of a chunk as read for others. Many queries read them apart, in one block of the ring."""
    work.num_keys -= num_relayed
    if num_queries < LEAST_ALONE:
        work.num_relayed_prompt_keys += num_relayed
        work.num_relayed_queries += num_queries


def _earlier_share(blocks: Iterable[QueryBlock], placement: Placement) -> float:
    """Return the share of pairs of queries and KV from before the step in which the key is earlier."""
    pairs = [(s.positions, block.positions) for block in blocks for s in placement.segments]
    num_pairs = sum(len(keys) * len(queries) for keys, queries in pairs)
    return sum(num_ordered_pairs(keys, queries) for keys, queries in pairs) / num_pairs


def _add_exchange(
    count: WorkCount,
    made: Mapping[InstanceId, int],
    held: Mapping[InstanceId, int],
    earlier_share: float,
) -> bool:
    """Count all queries of a request on every instance with its KV, old or new, and whether any travel."""
    num_new = sum(made.values())
    holders = made.keys() | held.keys()
    for instance_id in holders:
        work, num_made = count.at(instance_id), made.get(instance_id, 0)
        num_keys = held.get(instance_id, 0) + num_made
        work.num_attends += len(made)
        work.num_prompt_blocks += len(made)
        work.num_keys += num_keys
        num_earlier = earlier_share * held.get(instance_id, 0)
        num_pairs = num_new * (num_earlier + (num_made + num_made / num_new) / 2)
        work.num_pairs += num_pairs
        work.num_part_pairs += num_pairs - num_made * (num_made + 1) / 2
        count.answer(instance_id, num_new)
        if num_made:
            work.num_tokens += num_made
            work.num_blocks += 1
            work.num_sent_queries += num_made * (len(holders) - 1)
    return len(holders) > 1


def _add_kept(count: WorkCount, made: Mapping[InstanceId, int], writes: Iterable[KVSegment]) -> None:
    """Count KV stored on another instance than the one that makes it, rounded to tokens an instance."""
    left = dict(made)
    for segment in writes:
        num_own = min(left.get(segment.instance_id, 0), len(segment.positions))
        left[segment.instance_id] = left.get(segment.instance_id, 0) - num_own
        work, num_kept = count.at(segment.instance_id), len(segment.positions) - num_own
        work.num_kept_keys += num_kept
        if segment.instance_id not in count.instances:
            work.num_ring_keys += num_kept
