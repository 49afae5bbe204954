"""Measures the cost of shrinking a group after a prefill.

The same prompts run on one group, once with all KV kept where it is made, and once kept by fewer of the
instances. The ring passes all KV to every instance in any case, so retention needs no additional message.
LoongServe shows it in its figure 14a, under 3 %. Ceiling: 3 %.

    python benchmarks/gpu/scale_down.py --num-instances 2                                  # CPUs, a minute
    python benchmarks/gpu/scale_down.py llama-3.1-8b --load-format dummy --device cuda --num-instances 4 \\
        --prompts 1x8192 1x32768 1x131072
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from iteration_time import size_of

sys.path.append(str(Path(__file__).parents[1] / "support"))

from line_picture import Panel, lines_of, write_lines
from profiled_runs import ProfiledRuns, add_profiled_run_flags, dops_up_to, profiled_runs
from result import print_result, script_parser

from loong.workloads.report.report import table

CEILING = 0.03
PROMPTS = ("1x512", "8x512", "1x2048", "1x8192")
NUM_ROUNDS = 3  # of each case, by turns, so that a bad moment is not one case's alone


async def measure(args: argparse.Namespace) -> list[tuple[str, int, float, float]]:
    """Return case, keepers, seconds, and the factor over all keeping their part."""
    async with profiled_runs(args) as runs:
        return [row for case in args.prompts for row in await measure_case(runs, case)]


async def measure_case(runs: ProfiledRuns, case: str) -> list[tuple[str, int, float, float]]:
    """Measure one size of prompts with every number of keepers that has room."""
    group = runs.instance_ids
    number, length = size_of(case)
    counts = [count for count in dops_up_to(len(group)) if runs.has_room(number, length, group[:count])]
    times: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(NUM_ROUNDS):
        for count in counts:
            keepers = () if count == len(group) else group[:count]
            times[count].append((await runs.prefill([length] * number, group, keepers)).seconds)
    whole = median(times[len(group)])
    return [(case, count, median(seconds), median(seconds) / whole - 1) for count, seconds in times.items()]


def panel(rows: Sequence[tuple[str, int, float, float]]) -> Panel:
    """Plot the additional time of fewer keepers, in percent."""
    lines = lines_of((case, count, 100 * more) for case, count, _, more in rows)
    return Panel(
        "Prefill whose KV fewer instances keep",
        "instances that keep the KV",
        "more time than if all keep it (%)",
        lines,
        level=100 * CEILING,
        key="prompts x tokens",
        level_name="ceiling",
    )


def main() -> None:
    parser = script_parser("scale_down", __doc__)
    add_profiled_run_flags(parser)
    parser.add_argument(
        "--prompts", nargs="+", default=PROMPTS, help="prompts to measure, each REQUESTSxTOKENS (%(default)s)"
    )
    args = parser.parse_args()
    rows = asyncio.run(measure(args))
    cells = [
        (case, str(count), f"{1e3 * seconds:.2f}", f"{more:+.1%}") for case, count, seconds, more in rows
    ]
    print(table(("prompts x tokens", "kept by", "ms", "against all"), cells))
    if args.output_dir is not None:
        write_lines([panel(rows)], args.output_dir, "scale_down")
    numbers = {"model": args.model, "device": args.device, "ceiling": CEILING, "rows": rows}
    print_result("scale_down", numbers, save=args.save)


if __name__ == "__main__":
    main()
