"""Prefix hits of workloads: ideal ones, those of an LRU cache of a part of the room, and simulated ones.

The ceiling is the ideal: the longest common prefix, by token, with any earlier prompt and its answer. Of
traces with blocks (Mooncake's JSON lines) a column has the share of blocks that an earlier prompt has. There
the last block of a prompt counts as a whole one. The order is that of arrival, as if answers took no time.
With `--policy`, each workload is simulated, and the hits obtained are of the requests that completed; with
`--room`, on instances that have that part of the room, all together. Needs no device.

    python benchmarks/evaluation/prefix_hits.py --trace conversation.jsonl synthetic.jsonl    # a minute
    python benchmarks/evaluation/prefix_hits.py --workload agents --policy esp --rate 4
    python benchmarks/evaluation/prefix_hits.py --workload --trace conversation.jsonl --policy esp --room 0.25
"""

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, takewhile
from math import isinf
from operator import itemgetter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.hardware.model_shape import shape_of
from loong.model.shapes import find_config
from loong.simulation.cluster import Hardware
from loong.simulation.config import SimulateConfig, SimulatedLoadConfig
from loong.simulation.points import asked_of, run_point
from loong.workloads.data_file import DataFile
from loong.workloads.metrics.prefix_hits import PrefixCache, prefix_hits
from loong.workloads.metrics.slo import parse_slo
from loong.workloads.report.report import table
from loong.workloads.request import RequestShape, WorkloadRequest
from loong.workloads.workload import endless_workload, pace_of

WORKLOADS = ("agents", "chats", "leval(4)")
ROOM = (0.5, 0.25, 0.1)  # of an LRU cache, as shares of all tokens that are ever held
DEFAULT_RATE = 4.0
ALL_OF_A_TRACE = 10**9


@dataclass(frozen=True, slots=True)
class Hits:
    """Shares of the input tokens of a workload; `of_blocks` is a share of blocks, of traces alone.

    `num_tokens` is what an unlimited cache holds in the end. `by_room` are the hits of LRU caches with parts
    of this room. The obtained hits are None where nothing has completed. They are of pools with the part
    `room` of it, None: what memory holds.
    """

    workload: str
    num_requests: int
    num_input_tokens: int
    num_tokens: int
    ideal: float
    of_blocks: float | None
    by_room: dict[float, float]
    obtained: dict[str, float | None]
    room: float | None


def hits_of(workload: str, args: argparse.Namespace) -> Hits:
    """Return the hits of a workload, simulated under each policy."""
    is_trace = workload.startswith("trace:")
    num_requests = args.num_requests or (ALL_OF_A_TRACE if is_trace else 4_000)
    drawn = endless_workload(
        workload,
        seed=args.seed,
        request_rate=rate_of(workload, args),
        length_scale=args.length_scale,
        output_scale=args.output_scale,
    )
    shapes = in_order(islice(drawn, num_requests))
    num_input = sum(run.num_tokens for shape in shapes for run in shape.prompt)
    cache = PrefixCache()
    ideal = sum(map(cache.take, shapes)) / num_input
    num_pooled = None if args.room is None else int(args.room * cache.num_tokens / args.num_instances)
    return Hits(
        workload,
        len(shapes),
        num_input,
        cache.num_tokens,
        ideal,
        blocks_seen(shapes) if is_trace else None,
        {share: sum(prefix_hits(shapes, int(share * cache.num_tokens))) / num_input for share in ROOM},
        {policy: simulated(workload, policy, len(shapes), num_pooled, args) for policy in args.policy},
        args.room,
    )


def rate_of(workload: str, args: argparse.Namespace) -> float:
    """Return requests per second: those asked for, or those of a trace."""
    rate = pace_of(workload, args.rate).request_rate
    return DEFAULT_RATE if isinf(rate) else rate


def in_order(requests: Iterable[WorkloadRequest]) -> list[RequestShape]:
    """Return the prompts in the order in which they would arrive if answers took no time."""
    timed: list[tuple[float, RequestShape]] = []
    for request in requests:
        shape = request.shape
        time = timed[-1][0] + shape.think_time if shape.is_follower else request.arrival_time
        timed.append((time, shape))
    return [shape for _, shape in sorted(timed, key=itemgetter(0))]


def blocks_seen(shapes: Sequence[RequestShape]) -> float:
    """Return the share of blocks that an earlier prompt has, where a block stands for all before it."""
    seen: set[int] = set()
    num_seen = num_blocks = 0
    for shape in shapes:
        blocks = [run.seed for run in shape.new_runs]
        num_blocks += len(blocks)
        num_seen += sum(1 for _ in takewhile(seen.__contains__, blocks))
        seen.update(blocks)
    return num_seen / num_blocks


def simulated(
    workload: str, policy: str, num_requests: int, num_pooled: int | None, args: argparse.Namespace
) -> float | None:
    """Return the hits that a policy obtains in virtual time, on instances with `num_pooled` tokens each."""
    rate = rate_of(workload, args)
    config = SimulateConfig(
        args.model,
        (policy,),
        (parse_slo("tight"),),
        (rate,),
        Hardware(
            shape_of(find_config(args.model, "dummy")),
            args.device,
            args.num_instances,
            kv_cache_tokens=num_pooled,
        ),
        SimulatedLoadConfig(
            workload,
            args.seed,
            num_requests,
            burstiness=pace_of(workload).burstiness,
            length_scale=args.length_scale,
            output_scale=args.output_scale,
        ),
    )
    return run_point(config, asked_of(config, policy, config.rules[0], rate)).metrics.hit_rate


def row(hits: Hits) -> tuple[str, ...]:
    """Return a row of the table."""
    return (
        hits.workload,
        f"{hits.num_requests:,}",
        f"{hits.num_input_tokens:,}",
        f"{hits.num_tokens:,}",
        percent(hits.of_blocks),
        percent(hits.ideal),
        *map(percent, hits.by_room.values()),
        *map(percent, hits.obtained.values()),
    )


def percent(share: float | None) -> str:
    """Return a share in percent; - if there is none."""
    return "-" if share is None else f"{share:.1%}"


def main() -> None:
    parser = script_parser("prefix_hits", __doc__)
    parser.add_argument("--workload", nargs="*", default=WORKLOADS, help=f"({' '.join(WORKLOADS)})")
    parser.add_argument("--trace", nargs="*", default=(), help="files of requests, such as Mooncake's")
    parser.add_argument("--policy", nargs="*", default=(), help="policies to simulate (none)")
    parser.add_argument("--model", default="llama-3.1-8b", help="model to simulate (%(default)s)")
    parser.add_argument("--device", default="h200", help="device to simulate (%(default)s)")
    parser.add_argument("--num-instances", type=int, default=8, help="number of instances (%(default)s)")
    parser.add_argument(
        "--rate", type=float, help=f"requests per second (those of a trace, else {DEFAULT_RATE:g})"
    )
    parser.add_argument("--num-requests", type=int, help="of each workload (4,000, or all of a trace)")
    parser.add_argument("--length-scale", type=float, default=1.0, help="factor of all lengths (%(default)s)")
    parser.add_argument("--output-scale", type=float, help="factor of output lengths (that of all lengths)")
    parser.add_argument("--room", type=float, help="part of all tokens that pools have room for (memory)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (%(default)s)")
    args = parser.parse_args()
    found = []
    for workload in (*map(str, map(DataFile, args.trace)), *args.workload):
        found.append(hits_of(workload, args))
        print(found[-1], file=sys.stderr, flush=True)
    rooms = (f"LRU of {share:.4g}" for share in ROOM)
    header = ("workload", "requests", "input tokens", "tokens held", "blocks", "ideal", *rooms)
    print(table((*header, *args.policy), list(map(row, found))))
    runs = [asdict(hits) for hits in found]
    print_result("prefix_hits", {"command": shlex.join(["python", *sys.argv]), "runs": runs}, save=args.save)


if __name__ == "__main__":
    main()
