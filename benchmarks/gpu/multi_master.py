"""Measures the gain of several masters in decode.

A master does all but attention for its requests; with one master, the others of its group wait during that.
The same requests with the same KV run on one group with 1, 2 ... masters in turn. LoongServe shows it in its
figure 14b: 0.465 times the step of a single master with 1,024 requests of 10 tokens, 1.0 to 1.12 at long
contexts.

    python benchmarks/gpu/multi_master.py --num-instances 2                                # CPUs, a minute
    python benchmarks/gpu/multi_master.py llama-3.1-8b --load-format dummy --device cuda --num-instances 4 \\
        --cases 1024x10 256x1000 64x4000 4x100000
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from iteration_time import size_of

sys.path.append(str(Path(__file__).parents[1] / "support"))

from line_picture import Panel, lines_of, write_lines
from profiled_runs import add_profiled_run_flags, dops_up_to, profiled_runs
from result import print_result, script_parser

from loong.workloads.report.report import table

CASES = ("64x10", "256x10", "32x500", "4x4000")


async def measure(args: argparse.Namespace) -> list[tuple[str, int, float, float]]:
    """Return case, masters, seconds of a step, and the factor over one master."""
    rows = []
    async with profiled_runs(args) as runs:
        group = runs.instance_ids
        for case in args.cases:
            number, length = size_of(case)
            if not runs.has_room(number, length, group):
                continue
            alone = 0.0
            for num_masters in dops_up_to(min(number, len(group))):
                seconds = (await runs.decode(number, length, group, num_masters)).seconds
                alone = alone or seconds
                rows.append((case, num_masters, seconds, seconds / alone))
    return rows


def panel(rows: Sequence[tuple[str, int, float, float]]) -> Panel:
    """Plot a step relative to that of a single master."""
    lines = lines_of((case, masters, ratio) for case, masters, _, ratio in rows)
    return Panel(
        "A decode step by its masters",
        "masters",
        "time, of a step with one master",
        lines,
        level=1.0,
        key="requests x context",
    )


def main() -> None:
    parser = script_parser("multi_master", __doc__)
    add_profiled_run_flags(parser)
    parser.add_argument(
        "--cases", nargs="+", default=CASES, help="cases to measure, each REQUESTSxCONTEXT (%(default)s)"
    )
    args = parser.parse_args()
    rows = asyncio.run(measure(args))
    cells = [
        (case, str(count), f"{1e3 * seconds:.2f}", f"{ratio:.3f}x") for case, count, seconds, ratio in rows
    ]
    print(table(("requests x context", "masters", "ms a step", "of one master's"), cells))
    if args.output_dir is not None:
        write_lines([panel(rows)], args.output_dir, "multi_master")
    numbers = {"model": args.model, "device": args.device, "rows": rows}
    print_result("multi_master", numbers, save=args.save)


if __name__ == "__main__":
    main()
