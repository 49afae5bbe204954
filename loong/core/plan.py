"""The decisions of a policy: batches, the instances that run them, and the moves of KV."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple, TypeVar

from loong.core.decision import Decision
from loong.core.errors import InvalidPlanError
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId, KVSegment, Placement, tokens_by_instance
from loong.core.positions import intersection
from loong.core.request import RequestId

T = TypeVar("T")


class Transfer(Enum):
    """The tensors that travel between the instances of a group so that queries meet KV."""

    KV = "kv"  # blocks of KV go round the ring (striped prefill)
    QUERY = "query"  # queries go where KV is, partials come back (multi-master decode)


class QueryBlock(NamedTuple):
    """Positions of one request that one instance, their master, computes in a step.

    A master has several blocks of a request if those positions are no single range.
    """

    request_id: RequestId
    positions: range
    master_id: InstanceId
    transfer: Transfer

    def at_step(self, step: int) -> "QueryBlock":
        """Return the block `step` decode steps later."""
        shifted = range(self.positions.start + step, self.positions.stop + step, self.positions.step)
        return QueryBlock(self.request_id, shifted, self.master_id, self.transfer)


class KVPush(NamedTuple):
    """New KV of some positions of a block that its master pushes to an instance outside the group."""

    block: QueryBlock
    segment: KVSegment

    @property
    def is_attended_in_place(self) -> bool:
        """Return whether queries meet it in the master's pool, before it has gone."""
        return self.block.transfer is Transfer.QUERY

    @property
    def passing(self) -> KVSegment:
        """The same KV, where it is made."""
        return self.segment._replace(instance_id=self.block.master_id)


@dataclass(frozen=True)
class BatchPlan:
    """A batch for one group.

    With `num_steps` > 1 it is a lease: every block is one decode token, the group takes up to that many steps
    by itself, and `writes` names the slots of all of them. KV that travels may be written anywhere in the
    group; KV whose queries travel is written by the block's master. KV of one step may be written outside
    the group too: its master pushes it there. `predicted_time` is the predicted time of one step in seconds,
    for reports and comparisons. A lease may be cut into `num_micro_batches`: while attention of one is
    served, masters compute products of the next (Lamina, 5.1.2). If it `rotates`, layer k of micro-batch j
    is computed on member (j + k) mod DoP (5.1.1). Masters of its requests may be others.
    """

    group: ESPGroup
    queries: tuple[QueryBlock, ...]
    writes: tuple[KVSegment, ...]
    num_steps: int = 1
    predicted_time: float | None = None
    num_micro_batches: int = 1
    rotates: bool = False

    @cached_property
    def request_ids(self) -> tuple[RequestId, ...]:
        """Return the requests of the batch, each once, in the order of their first blocks."""
        return tuple(self._blocks)

    def blocks_of(self, request_id: RequestId) -> tuple[QueryBlock, ...]:
        """Return the blocks of one request."""
        return self._blocks.get(request_id, ())

    def writes_of(self, request_id: RequestId) -> tuple[KVSegment, ...]:
        """Return the segments of one request's new KV."""
        return self._writes.get(request_id, ())

    @cached_property
    def num_stored_tokens(self) -> Mapping[InstanceId, int]:
        """Return the number of tokens that each instance is to store."""
        return tokens_by_instance(self.writes)

    @cached_property
    def pushes(self) -> tuple["KVPush", ...]:
        """The KV that is written outside the group, with the block that makes it."""
        group = self.group.instance_ids
        return tuple(
            KVPush(block, segment._replace(positions=common))
            for segment in self.writes
            if segment.instance_id not in group
            for block in self.blocks_of(segment.owner_id)
            if (common := intersection(segment.positions, block.positions))
        )

    @cached_property
    def num_reserved_tokens(self) -> Mapping[InstanceId, int]:
        """For how many tokens each instance has room while the batch runs.

        This is the KV that it stores, and KV whose queries travel until it is pushed, which a master attends.
        """
        if not self.pushes:
            return self.num_stored_tokens
        passing = [push.passing for push in self.pushes if push.is_attended_in_place]
        return tokens_by_instance((*self.writes, *passing))

    def holder_ids(self, placements: Iterable[Placement]) -> tuple[InstanceId, ...]:
        """Return the instances outside the group that serve the batch, ascending.

        They hold some of the KV in `placements`, that of its requests, or are to hold KV that it makes.
        """
        held = {segment.instance_id for placement in placements for segment in placement.segments}
        return tuple(sorted(held.union(self.num_stored_tokens).difference(self.group.instance_ids)))

    @cached_property
    def num_written_tokens(self) -> Mapping[RequestId, int]:
        """Return the number of tokens of each request that are to be stored."""
        counts: dict[RequestId, int] = {}
        for segment in self.writes:
            counts[segment.owner_id] = counts.get(segment.owner_id, 0) + len(segment.positions)
        return counts

    @property
    def _spread_ids(self) -> tuple[RequestId, ...]:
        """Return the requests of a lease in an order whose runs have like shares of every master's."""
        masters = [self.blocks_of(request_id)[0].master_id for request_id in self.request_ids]
        totals, seen = Counter(masters), Counter[InstanceId]()
        places = dict[RequestId, float]()
        for request_id, master_id in zip(self.request_ids, masters, strict=True):
            places[request_id] = (seen[master_id] + 0.5) / totals[master_id]
            seen[master_id] += 1
        return tuple(sorted(places, key=places.__getitem__))

    @cached_property
    def _blocks(self) -> Mapping[RequestId, tuple[QueryBlock, ...]]:
        return _grouped(self.queries, attrgetter("request_id"))

    @cached_property
    def _writes(self) -> Mapping[RequestId, tuple[KVSegment, ...]]:
        return _grouped(self.writes, attrgetter("owner_id"))

    def lengthened(self, num_steps: int, stops: Mapping[RequestId, int]) -> "BatchPlan":
        """Return the lease with `num_steps` steps for these requests, each up to position `stops`."""
        writes: list[KVSegment] = []
        for block in self.queries:
            request_id, first = block.request_id, block.positions.start
            if (stop := stops.get(request_id)) is None:
                writes += self.writes_of(request_id)
            else:
                positions = range(first, min(first + num_steps, stop))
                writes.append(KVSegment(request_id, positions, block.master_id))
        return replace(self, writes=tuple(writes), num_steps=num_steps)

    def only_for(self, request_ids: Iterable[RequestId]) -> "BatchPlan":
        """Return the batch with the parts of these requests alone."""
        kept_ids = frozenset(request_ids)
        queries = tuple(block for block in self.queries if block.request_id in kept_ids)
        writes = tuple(segment for segment in self.writes if segment.owner_id in kept_ids)
        return BatchPlan(self.group, queries, writes, self.num_steps, self.predicted_time)

    @property
    def micro_batches(self) -> "tuple[BatchPlan, ...]":
        """Return the parts of a step that alternate, equal but for one request.

        Each has a like share of every master's requests, which are in their order over all parts.
        """
        number = min(self.num_micro_batches, len(self.request_ids))
        if number <= 1:
            return (self,)
        request_ids = self._spread_ids
        bounds = [len(request_ids) * i // number for i in range(number + 1)]
        return tuple(self.only_for(request_ids[a:b]) for a, b in pairwise(bounds))

    def at_step(self, step: int, live: Iterable[RequestId]) -> "BatchPlan":
        """Return step number `step` of a lease, for the requests that have not left it."""
        live_ids = frozenset(live)
        queries = tuple(block.at_step(step) for block in self.queries if block.request_id in live_ids)
        writes = tuple(KVSegment(b.request_id, b.positions, b.master_id) for b in queries)
        return BatchPlan(
            self.group, queries, writes, num_micro_batches=self.num_micro_batches, rotates=self.rotates
        )


def _grouped(items: Iterable[T], request_id_of: Callable[[T], RequestId]) -> dict[RequestId, tuple[T, ...]]:
    groups: dict[RequestId, list[T]] = {}
    for item in items:
        groups.setdefault(request_id_of(item), []).append(item)
    return {request_id: tuple(group) for request_id, group in groups.items()}


@dataclass(frozen=True, slots=True)
class KVMigration:
    """KV not in flight goes to another instance (or, for offload and fetch, to or from a host tier).

    KV of an owner that is no request may be read meanwhile. With `keeps_source` it is a copy of such KV: it
    stays where it is, too. Otherwise, what requests read of it stays until they can read it where it went.
    """

    segment: KVSegment
    destination_id: InstanceId
    keeps_source: bool = False

    def __post_init__(self) -> None:
        if self.segment.instance_id == self.destination_id:
            raise InvalidPlanError(f"{self.segment} is already on instance {self.destination_id}")

    @property
    def link(self) -> tuple[InstanceId, InstanceId]:
        """Return its source and its destination."""
        return self.segment.instance_id, self.destination_id

    @property
    def arriving(self) -> KVSegment:
        """Return the segment at its destination."""
        return self.segment._replace(instance_id=self.destination_id)


class PreemptionReason(Enum):
    """The reason why a request loses its KV. The values are labels of a metric."""

    NO_ROOM = "no_room"  # others need its slots to go on, and it came last
    TOO_LONG = "too_long"  # the instances of its group can never hold all of it
    REPAIR = "repair"  # there is no room to compute KV again that was lost with an instance
    CHANGED_ROLES = "changed_roles"  # its KV is on instances for prompts and on instances for decodes


@dataclass(frozen=True, slots=True)
class Preemption:
    """A request's KV is dropped; it waits, and is computed again from its known tokens."""

    request_id: RequestId
    reason: PreemptionReason = PreemptionReason.NO_ROOM


@dataclass(frozen=True, slots=True)
class Eviction:
    """KV not in flight is dropped. Its positions are missing then, and a batch computes just them again.

    KV of an owner that is no request may go, too, where nothing reads it.
    """

    segment: KVSegment


@dataclass(frozen=True, slots=True)
class Borrowing:
    """A request that begins with this plan reads these segments of other owners instead of computing them."""

    request_id: RequestId
    segments: tuple[KVSegment, ...]


class FailureCause(Enum):
    """The cause of a failure. The values are error codes of the API."""

    NO_PLAN = "internal_error"  # the policy has none for the request: a bug
    NO_ROOM = "kv_capacity_lost"  # the instances that are left cannot hold its KV
    LOSSES = "repeated_instance_loss"  # instances were lost in a row while they computed it


@dataclass(frozen=True, slots=True)
class Failure:
    """A request ends now, with the tokens that it has, because it could never go on."""

    request_id: RequestId
    reason: str
    cause: FailureCause = FailureCause.NO_PLAN


@dataclass(frozen=True, slots=True)
class LeaseEnd:
    """A running lease ends before step `step`, or at the first later boundary its group can agree on."""

    batch_id: int
    step: int


@dataclass(frozen=True, slots=True)
class LeaseExtension:
    """A running lease may take `num_steps` steps in all, if its group receives this before it ends.

    Those of its requests that have not ended go on as they are, with room at their masters.
    """

    batch_id: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """Everything a policy decides on one event. The empty plan changes nothing; `decisions` are reasons.

    `program_sizes` are the numbers of prompts that the batching program divided into batches, by call.
    """

    batches: tuple[BatchPlan, ...] = ()
    migrations: tuple[KVMigration, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    lease_ends: tuple[LeaseEnd, ...] = ()
    failures: tuple[Failure, ...] = ()
    decisions: tuple[Decision, ...] = ()
    lease_extensions: tuple[LeaseExtension, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    borrowings: tuple[Borrowing, ...] = ()
    program_sizes: tuple[int, ...] = ()

    @property
    def effective_borrowings(self) -> tuple[Borrowing, ...]:
        """Return those of requests that begin with it, and no others."""
        if not self.borrowings:
            return ()
        begun_ids = {request_id for batch in self.batches for request_id in batch.request_ids}
        return tuple([b for b in self.borrowings if b.request_id in begun_ids])
