"""Decode leases of several groups that read KV of one instance, which computes a prompt chunk by chunk.

So a profile measures what readers lose to each other, and what they cost the instance.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import fmean, median

from loong.core.cost.cost_model import CostModel
from loong.core.instance import ESPGroup, InstanceKind
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, IterationPlan
from loong.core.request import RequestId
from loong.profiling.profiled_cluster import ProfiledCluster
from loong.profiling.served_runs import LANE_CASES, NUM_CHUNKS, NUM_STEPS, Lease
from loong.scheduler.common.striping import batch_of, decode_part, whole_part

NUMBERS = (1, 2, 4, 8)  # of readers, as far as there are instances


@dataclass(frozen=True, slots=True)
class Readers:
    """The seconds of a step of each of `num_readers`, and of chunks of the instance that they read.

    By a cost model, the instance answers a step of one reader in `held` seconds, and reads for `reads` of
    them. `lost` is the part of the chunks' time that readers cost.
    """

    num_readers: int
    step: float
    held: float
    reads: float
    lost: float

    def crowding(self, alone: "Readers") -> float:
        """Return how much longer answers take than for one reader, by the share of time that others read."""
        share = (self.num_readers - 1) * self.reads / self.step
        return (self.step - alone.step) / (self.held * share) if share else 0.0


class ReaderRuns:
    """Leases of `num_requests` requests of `context` tokens on each reader. The last instance has the KV."""

    def __init__(
        self,
        cluster: ProfiledCluster,
        num_tokens: int,
        cost_model: CostModel,
        num_requests: int,
        context: int,
    ) -> None:
        """`num_tokens` are those of a chunk."""
        self._cluster, self._num_tokens, self._cost_model = cluster, num_tokens, cost_model
        self._num_requests, self._context = num_requests, context
        *others, self._holder = (i for i in cluster.snapshot().instances if i.kind is InstanceKind.FULL)
        self._reader_ids = [i.instance_id for i in others if self._holder.can_serve(i)]

    @property
    def numbers(self) -> list[int]:
        """The numbers of readers that there are instances and room for."""
        free = self._cluster.free()
        num_new = self._num_requests * NUM_STEPS
        reader_ids = [i for i in self._reader_ids if free[i] >= num_new]
        room = free[self._holder.instance_id] - NUM_CHUNKS * self._num_tokens
        most = min(len(reader_ids), room // (self._num_requests * self._context))
        return [n for n in NUMBERS if n <= most and self._holder.takes_lease(n - 1)]

    async def run(self, num_readers: int) -> Readers:
        """Run that many readers, with and without chunks of the holder, and leave nothing of them."""
        by_reader = {i: [*self._arriving()] for i in self._reader_ids[:num_readers]}
        for request_ids in by_reader.values():
            await self._compute(request_ids)
        alone = await self._chunks([])
        leases = self._begun(by_reader)
        while not all(lease.is_over for lease in leases):
            for event, _ in await self._cluster.next_events():
                for lease in leases:
                    lease.take(event)
        begin, end = max(lease.times[0] for lease in leases), min(lease.times[-1] for lease in leases)
        steps = [seconds for lease in leases for seconds in lease.steps(begin, end)]
        work = leases[0].work(len(leases[0].times)).holders[self._holder.instance_id]
        held, reads = self._cost_model.instance_time(work), self._cost_model.served_time(work)
        busy = await self._chunks(self._begun(by_reader))
        self._cluster.end_all()
        lost = [1 - before / later for before, later in zip(alone, busy, strict=False)]
        return Readers(num_readers, fmean(steps), held, reads, median(lost) if lost else 0.0)

    def _arriving(self) -> Iterator[RequestId]:
        for number in range(self._num_requests):
            yield self._cluster.arrive(self._context, Random(number))  # noqa: S311 - it guards nothing

    async def _compute(self, request_ids: Sequence[RequestId]) -> None:
        """Compute prompts at the holder."""
        while not all(view.is_decoding for view in self._cluster.views(request_ids)):
            await self._cluster.carry_out(IterationPlan((self._prompts(request_ids),)))

    def _prompts(self, request_ids: Sequence[RequestId]) -> BatchPlan:
        holder_id, parts, num_left = self._holder.instance_id, [], self._num_tokens
        for view in self._cluster.views(request_ids):
            if num_left and not view.is_decoding:
                parts.append(whole_part(view, min(num_left, view.num_uncomputed_tokens), holder_id))
                num_left -= parts[-1].num_tokens
        return batch_of(ESPGroup((holder_id,)), parts)

    def _begun(self, by_reader: dict[InstanceId, list[RequestId]]) -> list[Lease]:
        """Return leases that begin now, one on each reader."""
        leases = []
        for reader_id, request_ids in by_reader.items():
            views = self._cluster.views(request_ids)
            parts = [decode_part(view, reader_id, NUM_STEPS) for view in views]
            batch = batch_of(ESPGroup((reader_id,)), parts, NUM_STEPS)
            placements = self._cluster.placements()
            self._cluster.submit(IterationPlan((batch,)))
            leases.append(Lease(self._cluster.last_id, batch, placements))
        return leases

    async def _chunks(self, leases: Sequence[Lease]) -> list[float]:
        """Return the seconds of a prompt's chunks at the holder, in order, that end during all leases."""
        random = Random(0)  # noqa: S311 - it guards nothing
        request_id = self._cluster.arrive(NUM_CHUNKS * self._num_tokens, random)
        times, last_id = [self._cluster.now], self._begin_chunk(request_id)
        while last_id is not None or not all(lease.is_over for lease in leases):
            for event, applied in await self._cluster.next_events():
                for lease in leases:
                    lease.take(event)
                if applied.ended is not None and applied.ended.instruction.batch_id == last_id:
                    if not any(lease.is_over for lease in leases):
                        times.append(event.time)
                    last_id = self._begin_chunk(request_id)
        self._cluster.end(request_id)
        return [later - earlier for earlier, later in pairwise(times)]

    def _begin_chunk(self, request_id: RequestId) -> int | None:
        (view,) = self._cluster.views([request_id])
        if view.is_decoding:
            return None
        self._cluster.submit(IterationPlan((self._prompts([request_id]),)))
        return self._cluster.last_id


async def measured_readers(
    cluster: ProfiledCluster, num_tokens: int, cost_model: CostModel
) -> tuple[Readers, ...]:
    """Return what 1, 2, 4 and 8 readers of one instance lose and cost, as far as there is room for them."""
    num_requests, context = LANE_CASES[0]
    runs = ReaderRuns(cluster, num_tokens, cost_model, num_requests, context)
    return tuple([await runs.run(number) for number in runs.numbers])


def crowding_of(readers: Sequence[Readers]) -> float | None:
    """Return `ServiceLane.crowding` as measured; None if there were never several readers."""
    found = [several.crowding(readers[0]) for several in readers[1:]]
    return max(0.0, median(found)) if found else None
