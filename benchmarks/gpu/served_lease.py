"""Measures what a served decode lease costs: a step at its member, and a chunk of a prompt at its holders.

The first instance, the member, decodes requests whose KV is on the others, the holders. Instances are real
workers, and sampling is greedy. The same requests decode in three ways:

- local: all KV is at the member
- idle: the holders only attend for the member
- busy: meanwhile, each holder computes one chunk after another

The time of a step is a mean, as the engine sees it. That of a chunk is a median, from the end of one
to the end of the next. "Slower" is a chunk during a lease over one alone, less 1. "Reads" is the share of a
busy step in which a holder reads its KV, by the cost model. "Equal" is the share of tokens before the first
that differs from those of the local lease. Numbers of requests for which there is no room are lowered.
Floors: a local step, and a chunk that is slower by what its holder reads.

    python benchmarks/gpu/served_lease.py --chunk 4096 --cases 4x64 16x256       # two CPU processes, a minute
    python benchmarks/gpu/served_lease.py llama-3.1-8b --load-format dummy --device cuda
"""

import argparse
import asyncio
import sys
from dataclasses import asdict, astuple, dataclass, replace
from math import inf
from pathlib import Path
from statistics import fmean, median
from time import monotonic

from iteration_time import size_of

sys.path.append(str(Path(__file__).parents[1] / "support"))

from profiled_runs import Timed
from real_run import add_worker_flags, chosen_workers
from result import print_result, script_parser

from loong.launcher.cluster.start import local_workers
from loong.profiling.profiled_cluster import ProfiledCluster
from loong.profiling.served_runs import NUM_STEPS, ServedRun, ServedRuns
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.workloads.report.report import table

CASES = (
    *("16x8192", "16x1024", "1x65536", "64x1024", "16x65536"),
    *("64x8192", "1x8192", "1x1024", "64x65536"),
)
HEADER = (
    *("requests x context", "local, ms", "predicted", "idle", "predicted", "busy", "predicted", "worst"),
    *("chunk", "predicted", "slower", "predicted", "reads", "equal"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """The seconds of a step in each way, and of a chunk alone; the last four are shares."""

    num_requests: int
    context: int
    num_steps: int  # of each request
    local: Timed
    idle: Timed
    busy: Timed
    worst: float  # of the busy steps
    chunk: Timed
    slower: float
    predicted_slower: float
    reads: float
    equal: float

    @classmethod
    def of(cls, run: ServedRun, context: int, model: WorkCostModel) -> "Row":
        """Return the numbers of a run. Raises `ValueError` if the lease ended before the chunks."""
        remote = run.remote
        steps, chunks = remote.busy_steps, remote.served.seconds(remote.busy.times[-1])
        if not (steps and chunks):
            raise ValueError(f"no chunk ended in the {len(remote.busy.times)} steps of the lease")
        chunk, seconds = median(run.alone.seconds()), fmean(steps)
        local_steps = run.local.steps(end=run.local.times[NUM_STEPS - 1])
        idle, busy = remote.idle.work(NUM_STEPS), remote.busy.work(len(remote.busy.times))
        idle = replace(idle, idle_holder_ids=frozenset(idle.holders))
        predicted, holders = model.step_time(busy), busy.holders.values()
        lost = max(model.served_time(work) for work in holders) / predicted
        num_keys = max(work.num_decode_keys for work in holders)
        return cls(
            num_requests=len(run.local.tokens),
            context=context,
            num_steps=len(run.local.times),
            local=Timed(fmean(local_steps), model.step_time(run.local.work(NUM_STEPS))),
            idle=Timed(fmean(remote.idle.steps()), model.step_time(idle)),
            busy=Timed(seconds, predicted),
            worst=max(steps),
            chunk=Timed(chunk, model.step_time(run.alone.work)),
            slower=median(chunks) / chunk - 1,
            predicted_slower=_slower(lost),
            reads=_slower(model.coefficients.decode_key * num_keys / seconds),
            equal=run.equal,
        )

    def cells(self) -> tuple[str, ...]:
        """Return the texts of a line, in milliseconds and percents."""
        times = (*astuple(self.local), *astuple(self.idle), *astuple(self.busy), self.worst)
        steps = (f"{1e3 * seconds:.2f}" for seconds in times)
        chunk = (f"{1e3 * seconds:.1f}" for seconds in astuple(self.chunk))
        shares = (self.slower, self.predicted_slower, self.reads, self.equal)
        return (
            f"{self.num_requests}x{self.context}",
            *steps,
            *chunk,
            *(f"{share:.1%}" for share in shares),
        )


async def measure(args: argparse.Namespace) -> list[Row]:
    """Return the rows of all cases, printed as they come."""
    begun_at, rows = monotonic(), dict[tuple[int, int], Row]()
    config, model = chosen_workers(args)
    async with local_workers(config) as executor:
        instances = executor.members.serving(config.instances)
        runs = ServedRuns(ProfiledCluster(instances, executor, model.host.idle), args.chunk)
        print(
            f"started in {monotonic() - begun_at:.1f} s: {config.kv_capacity} tokens of KV each", flush=True
        )
        for number, context in map(size_of, args.cases):
            size = runs.num_fitting(number, context), context
            if size[0] and size not in rows and monotonic() - begun_at < args.time_limit:
                rows[size] = Row.of(await runs.run(*size), context, model)
                print(*rows[size].cells(), f"after {monotonic() - begun_at:.0f} s", flush=True)
    return list(rows.values())


def _slower(lost: float) -> float:
    """Return by which part a batch takes longer that loses a share of its time."""
    return lost / (1 - lost) if lost < 1 else inf


def main() -> None:
    parser = script_parser("served_lease", __doc__)
    add_worker_flags(parser)
    parser.set_defaults(num_instances=2)
    parser.add_argument(
        "--cases", nargs="+", default=CASES, help="cases to measure, each REQUESTSxCONTEXT (%(default)s)"
    )
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a chunk (%(default)s)")
    parser.add_argument(
        "--time-limit", type=float, default=inf, help="seconds after which no case begins (%(default)s)"
    )
    args = parser.parse_args()
    rows = asyncio.run(measure(args))
    print(table(HEADER, [row.cells() for row in rows]))
    numbers = {
        "model": args.model,
        "device": args.device,
        "chunk": args.chunk,
        "rows": list(map(asdict, rows)),
    }
    print_result("served_lease", numbers, save=args.save)


if __name__ == "__main__":
    main()
