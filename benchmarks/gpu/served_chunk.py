"""Measures what a chunk of a prompt costs whose history, or whose new KV, is on other instances.

The first instance, the member, computes chunks of a prompt. The others, the holders, have the prompt's
history in equal parts. Instances are real workers. The same chunks run in these ways:

- local: all KV is at the member
- idle: the history is at the holders, which only attend for the member
- busy: meanwhile, each holder computes one chunk of its own after another
- push: the history is at the member, and the new KV goes to the first holder

Times are medians by the workers' clocks. "Slower" is a chunk of a holder during the member's over one
alone, less 1. Floors: a local chunk, and a chunk of a holder that loses its attention for the member.

    python benchmarks/gpu/served_chunk.py --own 512 --cases 128x1024 512x1024    # two CPU processes, a minute
    python benchmarks/gpu/served_chunk.py llama-3.1-8b --load-format dummy --device cuda --num-instances 4
"""

import argparse
import asyncio
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from math import inf
from pathlib import Path
from random import Random
from statistics import median
from time import monotonic

from iteration_time import size_of

sys.path.append(str(Path(__file__).parents[1] / "support"))

from profiled_runs import Timed
from real_run import add_worker_flags, chosen_workers
from result import print_result, script_parser

from loong.core.cost.work import step_work
from loong.core.events import BatchFinished
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId, KVSegment
from loong.core.plan import BatchPlan, Eviction, IterationPlan
from loong.core.request import RequestId
from loong.launcher.cluster.start import local_workers
from loong.profiling.profiled_cluster import ProfiledCluster
from loong.scheduler.common.striping import batch_of, whole_part
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.workloads.report.report import table

CASES = ("2048x32768", "8192x32768", "2048x131072", "8192x131072")
NUM_CHUNKS = 3  # that count, after one that does not
MEMBER, HOLDER = 0, 1  # the first holder; all instances but the member are holders
HEADER = (
    *("chunk x history", "local, ms", "predicted", "idle", "predicted", "busy", "predicted"),
    *("push", "predicted", "holder's", "predicted", "slower", "predicted"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """The seconds of a chunk in each way, and of one of a holder alone; the last two are shares."""

    num_tokens: int
    history: int
    local: Timed
    idle: Timed
    busy: Timed
    push: Timed
    own: Timed
    slower: float
    predicted_slower: float

    def cells(self) -> tuple[str, ...]:
        """Return the texts of a line, in milliseconds and percents."""
        ways = (self.local, self.idle, self.busy, self.push, self.own)
        times = (f"{1e3 * seconds:.1f}" for way in ways for seconds in astuple(way))
        shares = (self.slower, self.predicted_slower)
        return f"{self.num_tokens}x{self.history}", *times, *(f"{share:.0%}" for share in shares)


class ServedChunks:
    """Chunks of the member, and of `num_own` tokens of each holder.

    A chunk's KV is evicted after it, so the next is the same.
    """

    def __init__(self, cluster: ProfiledCluster, model: WorkCostModel, num_own: int) -> None:
        self._cluster, self._model, self._num_own = cluster, model, num_own
        instances = cluster.snapshot().instances
        self._holder_ids = [i.instance_id for i in instances if i.instance_id != MEMBER]

    def has_room(self, num_tokens: int, history: int) -> bool:
        """Return whether all instances have room for a case."""
        num_needed = history + num_tokens + 2 * self._num_own
        return all(free >= num_needed for free in self._cluster.free().values())

    async def run(self, sizes: Sequence[int], history: int) -> AsyncIterator[Row]:
        """Yield the rows of chunks after one history, and leave nothing of them."""
        own = await self._own()
        near, far = await self._begun(max(sizes), history)
        for num_tokens in sizes:
            local = await self._alone(near, num_tokens, MEMBER)
            push = await self._alone(near, num_tokens, HOLDER)
            idle = await self._alone(far, num_tokens, MEMBER)
            busy, during, lost = await self._both(far, num_tokens)
            slower, predicted = during / own.seconds - 1, lost / (busy.predicted - lost)
            yield Row(num_tokens, history, local, idle, busy, push, own, slower, predicted)
        self._cluster.end_all()

    async def _begun(self, num_tokens: int, history: int) -> tuple[RequestId, RequestId]:
        """Return a prompt whose history is at the member, and the same with it at the holders."""
        near, far = (self._cluster.arrive(history + num_tokens + 1, Random(0)) for _ in range(2))
        await self._prefill(near, [MEMBER], history)
        await self._prefill(far, self._holder_ids, history)
        return near, far

    async def _prefill(self, request_id: RequestId, owners: Sequence[InstanceId], history: int) -> None:
        """Compute the first tokens of a prompt, equal parts on each owner."""
        done = 0
        for number, owner_id in enumerate(owners, 1):
            while left := history * number // len(owners) - done:
                size = min(left, 16384)
                await self._cluster.carry_out(
                    IterationPlan((self._chunk(request_id, size, owner_id, owner_id),))
                )
                done += size

    async def _own(self) -> Timed:
        """Run chunks of a holder alone, each a prompt."""
        times, predicted = [], 0.0
        for _ in range(1 + NUM_CHUNKS):
            batch = self._own_chunk(HOLDER)
            predicted = self._model.step_time(step_work(batch, self._cluster.placements()))
            await self._cluster.carry_out(IterationPlan((batch,)))
            assert self._cluster.batch_seconds is not None
            times.append(self._cluster.batch_seconds)
            self._cluster.end_all()
        return Timed(median(times[1:]), predicted)

    async def _alone(self, request_id: RequestId, num_tokens: int, stored_on: InstanceId) -> Timed:
        """Run chunks whose new KV one instance stores."""
        batch = self._chunk(request_id, num_tokens, MEMBER, stored_on)
        work, times = step_work(batch, self._cluster.placements()), []
        for _ in range(1 + NUM_CHUNKS):
            await self._cluster.carry_out(IterationPlan((batch,)))
            assert self._cluster.batch_seconds is not None
            times.append(self._cluster.batch_seconds)
            self._evict(batch)
        predicted = self._model.step_time(replace(work, idle_holder_ids=frozenset(work.holders)))
        return Timed(median(times[1:]), predicted)

    async def _both(self, request_id: RequestId, num_tokens: int) -> tuple[Timed, float, float]:
        """Return the chunk during those of holders, the seconds of one, and its largest predicted loss."""
        batch = self._chunk(request_id, num_tokens, MEMBER, MEMBER)
        work, times, during = step_work(batch, self._cluster.placements()), list[float](), list[float]()
        own = {self._submit(chunk): chunk for chunk in map(self._own_chunk, self._holder_ids)}
        uncounted = set(own)  # that do not begin and end while the member computes
        batch_id: int | None = self._submit(batch)
        while own or batch_id is not None:
            for event, _ in await self._cluster.next_events():
                if not isinstance(event, BatchFinished):
                    continue
                assert event.seconds is not None
                if event.batch_id == batch_id:
                    times.append(event.seconds)
                    self._evict(batch)
                    is_over = len(times) > NUM_CHUNKS and len(during) >= NUM_CHUNKS
                    batch_id = None if is_over else self._submit(batch)
                elif (done := own.pop(event.batch_id, None)) is not None:
                    if event.batch_id not in uncounted and batch_id is not None:
                        during.append(event.seconds)
                    self._cluster.end(done.request_ids[0])
                    if batch_id is not None:
                        chunk = self._own_chunk(done.group.instance_ids[0])
                        own[self._submit(chunk)] = chunk
        lost = max(map(self._model.served_time, work.holders.values()))
        return Timed(median(times[1:]), self._model.step_time(work)), median(during), lost

    def _submit(self, batch: BatchPlan) -> int:
        self._cluster.submit(IterationPlan((batch,)))
        return self._cluster.last_id

    def _evict(self, batch: BatchPlan) -> None:
        self._cluster.submit(IterationPlan(evictions=tuple(map(Eviction, batch.writes))))

    def _own_chunk(self, holder_id: InstanceId) -> BatchPlan:
        request_id = self._cluster.arrive(self._num_own, Random(0))
        return self._chunk(request_id, self._num_own, holder_id, holder_id)

    def _chunk(
        self, request_id: RequestId, num_tokens: int, member_id: InstanceId, stored_on: InstanceId
    ) -> BatchPlan:
        (view,) = self._cluster.views([request_id])
        part = whole_part(view, num_tokens, member_id)
        writes = tuple(KVSegment(s.owner_id, s.positions, stored_on) for s in part.writes)
        return batch_of(ESPGroup((member_id,)), [replace(part, writes=writes)])


async def measure(args: argparse.Namespace) -> list[Row]:
    """Return the rows of all cases, printed as they come."""
    begun_at, rows = monotonic(), list[Row]()
    config, model = chosen_workers(args)
    async with local_workers(config) as executor:
        instances = executor.members.serving(config.instances)
        runs = ServedChunks(ProfiledCluster(instances, executor, model.host.idle), model, args.own)
        print(
            f"started in {monotonic() - begun_at:.1f} s: {config.kv_capacity} tokens of KV each", flush=True
        )
        by_history = defaultdict[int, list[int]](list)
        for num_tokens, history in map(size_of, args.cases):
            if runs.has_room(num_tokens, history):
                by_history[history].append(num_tokens)
        for history, sizes in by_history.items():
            if monotonic() - begun_at < args.time_limit:
                async for row in runs.run(sizes, history):
                    rows.append(row)
                    print(*row.cells(), f"after {monotonic() - begun_at:.0f} s", flush=True)
    return rows


def main() -> None:
    parser = script_parser("served_chunk", __doc__)
    add_worker_flags(parser)
    parser.set_defaults(num_instances=2)
    parser.add_argument(
        "--cases", nargs="+", default=CASES, help="cases to measure, each CHUNKxHISTORY (%(default)s)"
    )
    parser.add_argument("--own", type=int, default=8192, help="tokens of a chunk of a holder (%(default)s)")
    parser.add_argument(
        "--time-limit", type=float, default=inf, help="seconds after which no history begins (%(default)s)"
    )
    args = parser.parse_args()
    if args.num_instances < 2:
        parser.error(f"--num-instances is {args.num_instances}, but a member needs a holder")
    rows = asyncio.run(measure(args))
    print(table(HEADER, [row.cells() for row in rows]))
    numbers = {"model": args.model, "device": args.device, "own": args.own, "rows": list(map(asdict, rows))}
    print_result("served_chunk", numbers, save=args.save)


if __name__ == "__main__":
    main()
