"""`loong plot`: flags and the files that are written."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from loong.core.errors import ConfigError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_EXAMPLES = """\
examples:
  loong bench --policy esp,static-sp --length-scale 1/64 --request-rate 10 --output-dir run
  loong plot                                # the newest run in this folder
  loong plot run                            # all pictures again, and run/report.html
  loong plot run --slo loongserve-12        # the same runs under another SLO, too
  loong plot run --window 3:6               # these seconds of the timeline closely
  loong plot monday tuesday --output-dir both    # runs of several folders in one report
  loong plot decisions.jsonl --output-dir why    # what a server did, from its decision log
"""


def add_parser(subparsers: "Subparsers") -> None:
    """Add the command `plot` and its flags."""
    parser = subparsers.add_parser(
        "plot",
        help="plot runs of bench and simulate, and write a report for a browser",
        description="Draw all pictures of runs, as PNG, SVG and one self-contained HTML page.",
        epilog=_EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="an --output-dir of bench or simulate, its results.json, a trace, or a decision log (.jsonl) "
        "(the newest run in this folder)",
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="folder for pictures and report (the folder of RUN, if only one is given)",
    )
    parser.add_argument(
        "--slo",
        nargs="+",
        default=[],
        metavar="RULE",
        help="judge the measured runs under these rules as well: tight, interactive, tight,tpot:10 or "
        "'ttft:2000 tpot:50'",
    )
    parser.add_argument(
        "--window",
        type=_window,
        metavar="A:B",
        help="seconds of the timeline to show closely (chosen automatically)",
    )


def run(args: argparse.Namespace) -> int:
    """Draw everything, print the paths of all files, and return 0."""
    from loong.runs.outputs import make_folder, sole_writer  # these import what `--help` can do without
    from loong.runs.report.report import write_pictures_and_report
    from loong.runs.report.run_files import read_run_files
    from loong.runs.run_folder import newest_run
    from loong.workloads.metrics.slo import parse_slo

    runs = args.runs or [newest_run()]
    folder = _folder(runs, args.output_dir)
    files = read_run_files(runs).judged_under([parse_slo(text) for text in args.slo])
    make_folder("--output-dir", folder)
    with sole_writer("--output-dir", folder):
        written = write_pictures_and_report(files, folder, args.window)
    print(f"Wrote {', '.join(map(str, written))}", file=sys.stderr)
    return 0


def _folder(runs: list[Path], output_dir: Path | None) -> Path:
    if output_dir is not None:
        return output_dir
    if len(runs) > 1:
        raise ConfigError(f"{len(runs)} runs are given; say with --output-dir where their pictures go")
    return runs[0] if runs[0].is_dir() else runs[0].parent


def _window(text: str) -> tuple[float, float]:
    start, _, end = text.partition(":")
    try:
        window = float(start), float(end)
    except ValueError:
        window = 0.0, 0.0
    if not 0 <= window[0] < window[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of seconds; write 3:6 for those from 3 to 6")
    return window
