"""Measures the engine's time for one step of a running decode lease, in which no policy is called.

All requests are in one group, whose masters each report their tokens in a frame of their own. In a step, the
engine decodes the frames, applies the events, counts, and passes the tokens on to their streams. It is
measured twice: with readers that are busy (`step`), and with one waiting reader for each stream (`step and
readers`). The difference is the fan-out. `start` is the start of the lease: its input for every request, made
and encoded. Ceiling: 50 us a step at 64 requests, 150 us at 256.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import uvloop

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.core.applied import Applied
from loong.core.cost.cost_model import CostModel
from loong.core.events import Event, ProducedToken, TokensProduced
from loong.core.instance import ElasticInstance, ESPGroup, InstanceKind
from loong.core.instructions import Instruction, RunBatch
from loong.core.placement import KVSegment
from loong.core.plan import BatchPlan, IterationPlan, QueryBlock, Transfer
from loong.core.request import Request, SamplingParams
from loong.core.snapshot import Snapshot
from loong.engine.client import EngineLimits
from loong.engine.engine import Engine
from loong.engine.loop import Scheduling
from loong.executor.endpoints import Endpoints
from loong.executor.workers import WorkersExecutor
from loong.messages.wire import BatchDone, StepDone, encode
from loong.observability.timeline import Timeline
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.server.openai.token_stream import TokenStream
from loong.state.cluster_state import ClusterState

CEILINGS = {64: 50e-6, 256: 150e-6}
NUM_STEPS = 400
PROMPT = tuple(range(100))
PARAMS = SamplingParams(max_tokens=NUM_STEPS + 9)


@dataclass
class Seen:
    """An observer that counts tokens, and keeps the batches that were started."""

    num_tokens: int = 0
    batches: list[RunBatch] = field(default_factory=list)

    def on_event(self, event: Event, _applied: Applied, /) -> None:
        """Count tokens."""
        if isinstance(event, TokensProduced):
            self.num_tokens += len(event.tokens)

    def on_plan(
        self, _e: Sequence[Event], _s: Snapshot, _p: IterationPlan, instructions: Sequence[Instruction], /
    ) -> None:
        """Keep the batches that start."""
        self.batches += [reported for reported in instructions if isinstance(reported, RunBatch)]

    async def wait_for(self, num_tokens: int, num_batches: int) -> None:
        """Wait until this many tokens were passed on, and this many batches were started."""
        while self.num_tokens < num_tokens or len(self.batches) < num_batches:  # noqa: ASYNC110 - no Event, whose cost would count
            await asyncio.sleep(0)


@dataclass(frozen=True)
class OneGroup:
    """A policy: it waits for all requests, prefills them together, and decodes them on one lease."""

    num_requests: int
    num_masters: int

    def __call__(self, snapshot: Snapshot, _cost_model: CostModel, /) -> IterationPlan:
        """Return the plan with the batch that is due."""
        if snapshot.batches or len(snapshot.request) < self.num_requests:
            return IterationPlan()
        num_steps = NUM_STEPS if snapshot.running else 1
        queries, writes = [], []
        for number, view in enumerate((*snapshot.waiting, *snapshot.running)):
            first, master_id = view.num_computed_tokens, number % self.num_masters
            new = range(first, view.num_known_tokens)
            transfer = Transfer.QUERY if snapshot.running else Transfer.KV
            queries.append(QueryBlock(view.request_id, new, master_id, transfer))
            writes.append(KVSegment(view.request_id, range(first, new.stop + num_steps - 1), master_id))
        group = ESPGroup(tuple(range(self.num_masters)))
        return IterationPlan((BatchPlan(group, tuple(queries), tuple(writes), num_steps),))


def frames(batch: RunBatch, step: int) -> list[bytes]:
    """Return the masters' reports after a step of a batch."""
    tokens: dict[int, list[ProducedToken]] = {}
    for block in batch.plan.queries:
        tokens.setdefault(block.master_id, []).append(ProducedToken(block.request_id, 1000 + step))
    return [encode(StepDone(batch.batch_id, step, tuple(mine))) for mine in tokens.values()]


async def measure(num_requests: int, num_masters: int, *, with_readers: bool) -> tuple[float, float]:
    """Return the seconds of a step, and of encoding the start of the lease; medians."""
    instances = tuple(ElasticInstance(i, 1, InstanceKind.FULL, 1 << 30) for i in range(num_masters))
    seen, policy = Seen(), OneGroup(num_requests, num_masters)
    with TemporaryDirectory() as folder:
        commands = {(i, 0): f"ipc://{Path(folder) / str(i)}" for i in range(num_masters)}  # nobody listens
        executor = WorkersExecutor(Endpoints(f"ipc://{Path(folder) / 'reports'}", commands, num_masters))
        scheduling = Scheduling(ClusterState(instances), policy, WorkCostModel(), executor, (seen,))
        engine = Engine(scheduling, executor, EngineLimits(1 << 30, 1 << 30, 1 << 30), Timeline(1))
        tasks = [asyncio.create_task(read(engine, i, with_readers)) for i in range(num_requests)]
        tasks.append(asyncio.create_task(engine.run()))
        lease = await start_lease(executor, seen, policy.num_requests)
        steps = [
            await step_time(executor, seen, frames(lease, i), num_requests, with_readers)
            for i in range(NUM_STEPS - 1)
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        executor.close()
    return median(steps), encode_time(lease)


async def start_lease(executor: WorkersExecutor, seen: Seen, num_requests: int) -> RunBatch:
    """Let the requests arrive and report their prompts as computed; return the lease that then starts."""
    await seen.wait_for(num_tokens=0, num_batches=1)
    (prefill,) = seen.batches
    ends = [encode(BatchDone(prefill.batch_id, i, 0, 1)) for i in prefill.plan.group.instance_ids]
    for frame in (*frames(prefill, 0), *ends):
        executor.receive(frame)
    await seen.wait_for(num_requests, num_batches=2)
    return seen.batches[-1]


async def step_time(
    executor: WorkersExecutor, seen: Seen, reported: Sequence[bytes], num_tokens: int, with_readers: bool
) -> float:
    """Return the seconds from the frames of a step to its tokens in their streams, or to their readers."""
    await asyncio.sleep(0)
    begun_at = perf_counter()
    for frame in reported:
        executor.receive(frame)
    await seen.wait_for(seen.num_tokens + num_tokens, num_batches=2)
    if with_readers:
        await asyncio.sleep(0)  # all of them were woken before this task
    return perf_counter() - begun_at


async def read(engine: Engine, number: int, with_readers: bool) -> None:
    """Submit a request, and read all its tokens, or only the first."""
    request = Request(f"chatcmpl-{number:032x}", PROMPT, PARAMS, arrival_time=0.0)
    with TokenStream(engine, request) as tokens:
        async for _ in tokens:
            if not with_readers:
                await asyncio.Event().wait()


def encode_time(lease: RunBatch) -> float:
    """Return the seconds to encode the start of a lease."""
    times = []
    for _ in range(50):
        begun_at = perf_counter()
        encode(lease)
        times.append(perf_counter() - begun_at)
    return median(times)


def main() -> None:
    parser = script_parser("lease_step", __doc__)
    parser.add_argument(
        "--num-requests",
        type=int,
        nargs="+",
        default=[64, 256],
        help="numbers of requests to measure (%(default)s)",
    )
    parser.add_argument(
        "--num-masters",
        type=int,
        nargs="+",
        default=[1, 8],
        help="numbers of masters to measure (%(default)s)",
    )
    args = parser.parse_args()
    print(f"{'requests':>8}{'masters':>8}{'step, us':>10}{'step and readers, us':>22}{'encode, us':>12}")
    rows = []
    for num_requests in args.num_requests:
        for num_masters in args.num_masters:
            step, start = uvloop.run(measure(num_requests, num_masters, with_readers=False))
            both, _ = uvloop.run(measure(num_requests, num_masters, with_readers=True))
            shown = f"{1e6 * step:>10.0f}{1e6 * both:>22.0f}{1e6 * start:>12.0f}"
            print(f"{num_requests:>8}{num_masters:>8}{shown}")
            rows.append(
                {
                    "num_requests": num_requests,
                    "num_masters": num_masters,
                    "step_seconds": step,
                    "step_and_readers_seconds": both,
                    "encode_seconds": start,
                }
            )
    numbers = {"ceilings": CEILINGS, "rows": rows}
    print_result("lease_step", numbers, save=args.save)


if __name__ == "__main__":
    main()
