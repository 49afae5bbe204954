"""Measures an iteration, by batch, length and degree of parallelism.

Prefills of whole prompts and decode steps (in leases of 16) run on groups of every size, on real workers.
They are compared with the cost model's predictions. They show why one DoP does not fit all: long prompts gain
from many instances, short ones and most decodes do not. LoongServe shows it in its figures 2 and 3, and the
errors of its iteration-time model in figure 15. Errors are predicted over measured seconds, less 1. Ceiling:
a mean error of 10 %.

    python benchmarks/gpu/iteration_time.py --num-instances 2                              # CPUs, a minute
    python benchmarks/gpu/iteration_time.py llama-3.1-8b --load-format dummy --device cuda \\
        --num-instances 4 \\
        --prompts 1x1024 16x1024 1x16384 1x131072 --decodes 1x1024 64x1024 1x131072
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

sys.path.append(str(Path(__file__).parents[1] / "support"))

from line_picture import Panel, lines_of, write_lines
from profiled_runs import add_profiled_run_flags, dops_up_to, profiled_runs
from result import print_result, script_parser

from loong.workloads.report.report import table

PROMPTS = ("1x64", "8x64", "1x512", "8x512", "1x2048", "1x8192")
DECODES = ("1x64", "16x64", "1x2048", "8x2048", "1x16384")
TITLES = {"prefill": "Prefill of whole prompts", "decode": "A decode step"}


def size_of(case: str) -> tuple[int, int]:
    number, length = map(int, case.split("x"))
    return number, length


async def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    """Measure every case on every size of group that has room for it."""
    rows: list[dict[str, object]] = []
    async with profiled_runs(args) as runs:
        for phase, cases in (("prefill", args.prompts), ("decode", args.decodes)):
            for case in cases:
                number, length = size_of(case)
                for dop in dops_up_to(len(runs.instance_ids)):
                    group = runs.instance_ids[:dop]
                    if not runs.has_room(number, length, group):
                        continue
                    if phase == "prefill":
                        timed = await runs.prefill([length] * number, group)
                    else:
                        timed = await runs.decode(number, length, group, num_masters=min(number, dop))
                    error = timed.predicted / timed.seconds - 1
                    rows.append(
                        {
                            "phase": phase,
                            "case": case,
                            "dop": dop,
                            "seconds": timed.seconds,
                            "predicted": timed.predicted,
                            "error": error,
                        }
                    )
                    print(f"{phase} {case} at DoP {dop}: {1e3 * timed.seconds:.2f} ms", flush=True)
    return rows


def panels(rows: Sequence[dict[str, object]]) -> list[Panel]:
    """Return plots of milliseconds over DoP, a line a case; predictions dashed."""
    found = []
    for phase, title in TITLES.items():
        lines = lines_of(
            (f"{row['case']}{suffix}", float(str(row["dop"])), 1e3 * float(str(row[key])))
            for row in rows
            for key, suffix in (("seconds", ""), ("predicted", ", predicted"))
            if row["phase"] == phase
        )
        if lines:
            found.append(
                Panel(
                    title, "degree of parallelism", "time", lines, has_log_times=True, key="requests x tokens"
                )
            )
    return found


def main() -> None:
    parser = script_parser("iteration_time", __doc__)
    add_profiled_run_flags(parser)
    parser.add_argument(
        "--prompts",
        nargs="*",
        default=PROMPTS,
        help="prefills to measure, each REQUESTSxTOKENS (%(default)s)",
    )
    parser.add_argument(
        "--decodes",
        nargs="*",
        default=DECODES,
        help="decode steps to measure, each REQUESTSxCONTEXT (%(default)s)",
    )
    args = parser.parse_args()
    rows = asyncio.run(measure(args))
    cells = [
        (
            f"{row['phase']} {row['case']}",
            str(row["dop"]),
            f"{1e3 * float(str(row['seconds'])):.2f}",
            f"{1e3 * float(str(row['predicted'])):.2f}",
            f"{float(str(row['error'])):+.1%}",
        )
        for row in rows
    ]
    print(table(("requests x tokens", "DoP", "ms", "predicted", "error"), cells))
    mean_error = fmean(abs(float(str(row["error"]))) for row in rows)
    print(f"\nmean error of the cost model: {mean_error:.1%}\n")
    if args.output_dir is not None:
        write_lines(panels(rows), args.output_dir, "iteration_time")
    numbers = {"model": args.model, "device": args.device, "mean_error": mean_error, "rows": rows}
    print_result("iteration_time", numbers, save=args.save)


if __name__ == "__main__":
    main()
