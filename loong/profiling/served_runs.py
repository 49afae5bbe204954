"""Decode leases over KV on other instances, and chunks of prompts that these compute meanwhile.

So a profile measures what a reader waits for a holder that computes, and what the holder loses. A fit of
batches that run alone cannot.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from random import Random
from statistics import fmean, median

from loong.core.applied import Applied
from loong.core.cost.cost_model import CostModel
from loong.core.cost.work import StepWork, batch_work, step_work
from loong.core.events import BatchFinished, Event, TokensProduced
from loong.core.instance import ESPGroup, InstanceKind
from loong.core.placement import InstanceId, Placement
from loong.core.plan import BatchPlan, IterationPlan
from loong.core.request import RequestId, TokenId
from loong.profiling.profiled_cluster import ProfiledCluster
from loong.scheduler.common.leases import lease_ends
from loong.scheduler.common.striping import batch_of, decode_part, whole_part
from loong.scheduler.cost.cost_model import ServiceLane

NUM_STEPS, NUM_WARM_UPS = 48, 8  # of a lease without chunks, and of these the steps that do not count
MOST_STEPS = 512  # of a lease that goes on until all chunks have ended
NUM_CHUNKS = 4  # on each holder, after one that does not count
LANE_CASES = ((8, 256), (2, 4096))  # requests and their context


@dataclass(slots=True)
class Lease:
    """A lease with the KV before it, and the tokens and times of its steps."""

    batch_id: int
    batch: BatchPlan
    placements: Mapping[RequestId, Placement]
    times: list[float] = field(default_factory=list)
    tokens: dict[RequestId, list[TokenId]] = field(default_factory=lambda: defaultdict(list))
    is_over: bool = False

    def take(self, event: Event) -> None:
        """Note an event, if it is of this lease."""
        match event:
            case TokensProduced() if event.batch_id == self.batch_id:
                self.times.append(event.time)
                for token in event.tokens:
                    self.tokens[token.request_id].append(token.token_id)
            case BatchFinished() if event.batch_id == self.batch_id:
                self.is_over = True
            case _:
                pass

    def work(self, num_steps: int) -> StepWork:
        """Return the work of the middle one of its first steps."""
        _, (step, _) = batch_work(self.batch, self.placements, num_steps)
        return step

    def steps(self, begin: float = -inf, end: float = inf) -> list[float]:
        """Return the seconds of the steps in a span of time, less those that warm up."""
        return [
            later - earlier
            for earlier, later in pairwise(self.times[NUM_WARM_UPS:])
            if begin <= earlier and later <= end
        ]


class Chunks:
    """Prompts that each holder computes one after another; `has_begun` once `start` was called."""

    def __init__(
        self, cluster: ProfiledCluster, holder_ids: Sequence[InstanceId], num_tokens: int, random: Random
    ) -> None:
        self._cluster = cluster
        self._waiting = {
            i: [cluster.arrive(num_tokens, random) for _ in range(1 + NUM_CHUNKS)] for i in holder_ids
        }
        self.has_begun = False
        self._ended: dict[InstanceId, list[Event]] = {i: [] for i in holder_ids}
        self.work = StepWork(ESPGroup((holder_ids[0],)), {}, has_ring=False, has_exchange=False)

    @property
    def is_over(self) -> bool:
        """Return whether all have ended."""
        return not any(self._waiting.values())

    @property
    def span(self) -> tuple[float, float]:
        """Return the times between which all holders compute chunks that count."""
        ended = self._ended.values()
        return max(events[0].time for events in ended), min(events[-1].time for events in ended)

    def seconds(self, end: float = inf) -> list[float]:
        """Return the seconds of those that count and ended before `end`: from the end of the one before."""
        ended = ([event.time for event in events if event.time <= end] for events in self._ended.values())
        return [later - earlier for times in ended for earlier, later in pairwise(times)]

    def start(self) -> None:
        """Begin the first on each holder."""
        self.has_begun = True
        for holder_id in self._waiting:
            self._begin_next(holder_id)

    def take(self, event: Event, applied: Applied) -> None:
        """Begin the next where one has ended, whose KV is then free."""
        if applied.ended is None:
            return
        if (holder_id := applied.ended.instruction.plan.group.leader_id) in self._waiting:
            self._ended[holder_id].append(event)
            self._cluster.end(self._waiting[holder_id].pop(0))
            self._begin_next(holder_id)

    def _begin_next(self, holder_id: InstanceId) -> None:
        if self._waiting[holder_id]:
            (view,) = self._cluster.views(self._waiting[holder_id][:1])
            part = whole_part(view, view.num_uncomputed_tokens, holder_id)
            batch = batch_of(ESPGroup((holder_id,)), [part])
            self.work = step_work(batch, self._cluster.placements())
            self._cluster.submit(IterationPlan((batch,)))


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """Leases of prompts whose KV is at the holders: before chunks of these, and during them."""

    idle: Lease
    busy: Lease
    served: Chunks

    @property
    def busy_steps(self) -> list[float]:
        """Return the seconds of the steps during which all holders compute."""
        return self.busy.steps(*self.served.span)


@dataclass(frozen=True, slots=True)
class ServedRun:
    """Leases of the same prompts with remote and with local KV, and chunks without a lease.

    `equal` is the share of tokens before the first that differs between local and remote.
    """

    remote: RemoteRun
    local: Lease
    alone: Chunks
    equal: float


class ServedRuns:
    """Leases of the first instance, and chunks of `num_tokens` on all others that serve it."""

    def __init__(self, cluster: ProfiledCluster, num_tokens: int) -> None:
        self._cluster, self._num_tokens = cluster, num_tokens
        member, *others = (i for i in cluster.snapshot().instances if i.kind is InstanceKind.FULL)
        self._member_id = member.instance_id
        self._holder_ids = [other.instance_id for other in others if other.can_serve(member)]

    def num_fitting(self, num_requests: int, context: int) -> int:
        """Return the number of such requests, up to `num_requests`, that all instances have room for."""
        if not self._holder_ids:
            return 0
        free = self._cluster.free()
        room = min(free[i] for i in self._holder_ids) - self._num_tokens
        num_held = len(self._holder_ids) * (room // context)
        return max(
            0, min(num_requests, num_held, free[self._member_id] // (context + NUM_STEPS + MOST_STEPS))
        )

    async def run(self, num_requests: int, context: int) -> ServedRun:
        """Run requests of equal length in all ways, and leave nothing of them."""
        local, remote = ([*self._arriving(num_requests, context)] for _ in range(2))
        await self._compute(remote, local)
        alone = await self.chunks_alone()
        run = await self._run_remote(remote)
        near = self._begun(local, len(run.idle.times) + len(run.busy.times))
        await self._run(near)
        self._cluster.end_all()
        pairs = [
            (near.tokens[i], run.idle.tokens[j] + run.busy.tokens[j])
            for i, j in zip(local, remote, strict=True)
        ]
        num_equal = sum(_num_equal(*pair) for pair in pairs)
        return ServedRun(run, near, alone, num_equal / sum(len(tokens) for tokens, _ in pairs))

    async def chunks_alone(self) -> Chunks:
        """Run chunks on all holders without a lease."""
        alone = self._chunks()
        await self._run_chunks(alone)
        return alone

    async def run_remote(self, num_requests: int, context: int) -> RemoteRun:
        """Run requests with remote KV alone, and leave nothing of them."""
        remote = [*self._arriving(num_requests, context)]
        await self._compute(remote)
        run = await self._run_remote(remote)
        self._cluster.end_all()
        return run

    async def _run_remote(self, remote: Sequence[RequestId]) -> RemoteRun:
        idle = self._begun(remote, NUM_STEPS)
        await self._run(idle)
        served = self._chunks()
        busy = self._begun(remote, MOST_STEPS)
        await self._run_with(busy, served)
        for request_id in remote:
            self._cluster.end(request_id)
        return RemoteRun(idle, busy, served)

    def _arriving(self, num_requests: int, context: int) -> Iterator[RequestId]:
        """Yield requests; those with the same number have the same prompt."""
        for number in range(num_requests):
            yield self._cluster.arrive(context, Random(number))  # noqa: S311 - reproducible, guards nothing

    def _chunks(self) -> Chunks:
        random = Random(0)  # noqa: S311 - as above
        return Chunks(self._cluster, self._holder_ids, self._num_tokens, random)

    async def _compute(self, remote: Sequence[RequestId], local: Sequence[RequestId] = ()) -> None:
        """Compute prompts at the holders in turn, and the same in the same batches, if any, at the member."""
        for number, holder_id in enumerate(self._holder_ids):
            there, here = remote[number :: len(self._holder_ids)], local[number :: len(self._holder_ids)]
            while not all(view.is_decoding for view in self._cluster.views(there)):
                batches = [self._prompts(there, holder_id)]
                if here:
                    batches.append(self._prompts(here, self._member_id))
                await self._cluster.carry_out(IterationPlan(tuple(batches)))

    def _prompts(self, request_ids: Sequence[RequestId], instance_id: InstanceId) -> BatchPlan:
        """Return a batch with the next tokens of prompts, as many as a chunk has."""
        parts, num_left = [], self._num_tokens
        for view in self._cluster.views(request_ids):
            if num_left and not view.is_decoding:
                parts.append(whole_part(view, min(num_left, view.num_uncomputed_tokens), instance_id))
                num_left -= parts[-1].num_tokens
        return batch_of(ESPGroup((instance_id,)), parts)

    def _begun(self, request_ids: Sequence[RequestId], num_steps: int) -> Lease:
        """Return a lease that begins now."""
        views = self._cluster.views(request_ids)
        parts = [decode_part(view, self._member_id, num_steps) for view in views]
        batch = batch_of(ESPGroup((self._member_id,)), parts, num_steps)
        placements = self._cluster.placements()
        self._cluster.submit(IterationPlan((batch,)))
        return Lease(self._cluster.last_id, batch, placements)

    async def _run(self, lease: Lease) -> None:
        while not lease.is_over:
            for event, _ in await self._cluster.next_events():
                lease.take(event)

    async def _run_chunks(self, chunks: Chunks) -> None:
        chunks.start()
        while not chunks.is_over:
            for event, applied in await self._cluster.next_events():
                chunks.take(event, applied)

    async def _run_with(self, lease: Lease, chunks: Chunks) -> None:
        """Begin chunks once a lease has warmed up, and end it when they have ended."""
        while not (lease.is_over and chunks.is_over):
            for event, applied in await self._cluster.next_events():
                lease.take(event)
                chunks.take(event, applied)
            if len(lease.times) > NUM_WARM_UPS and not chunks.has_begun:
                chunks.start()
            if chunks.is_over and not lease.is_over:
                self._cluster.submit(IterationPlan(lease_ends=lease_ends(self._cluster.snapshot().batches)))


async def measured_lane(
    cluster: ProfiledCluster, num_tokens: int, cost_model: CostModel
) -> ServiceLane | None:
    """Return what a reader and its holders lose to each other while these compute chunks of `num_tokens`.

    The seconds of the reads are those of `cost_model`. None if no instance serves, or there is no room.
    """
    runs, delays, losses = ServedRuns(cluster, num_tokens), [], []
    for most_requests, context in LANE_CASES:
        if num_requests := runs.num_fitting(most_requests, context):
            alone, run = await runs.chunks_alone(), await runs.run_remote(num_requests, context)
            steps, chunks = run.busy_steps, run.served.seconds(run.busy.times[-1])
            if steps and chunks:
                work, step = run.busy.work(len(run.busy.times)), fmean(steps)
                delays.append(step - fmean(run.idle.steps()))
                reads = max(map(cost_model.served_time, work.holders.values()))
                losses.append((1 - median(alone.seconds()) / median(chunks)) * step - reads)
    return ServiceLane(max(0.0, median(delays)), max(0.0, median(losses))) if delays else None


def _num_equal(tokens: Sequence[TokenId], others: Sequence[TokenId]) -> int:
    """Return the number of tokens before the first that differs."""
    pairs = enumerate(zip(tokens, others, strict=True))
    return next((number for number, (token, other) in pairs if token != other), len(tokens))
