"""`loong workload describe` and `loong workload save`: flags and actions."""

import argparse
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from loong.core.errors import ConfigError
from loong.launcher.flags import add_drawing_flags, positive

if TYPE_CHECKING:
    from loong.workloads.request import WorkloadRequest

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DEFAULT_NUMBER = 1_000
_EXAMPLES = """\
examples:
  loong workload describe 'mixed@poisson(2)' --plot mixed.png
  loong workload describe '0.7*sharegpt+0.3*zipf(1.2,10,200000)'
  loong workload describe trace:AzureLLMInferenceTrace_conv.csv
  loong workload save 'mixed@poisson(2)' --num-requests 500 -o mixed.jsonl
  loong bench --workload trace:mixed.jsonl --num-requests 500
"""


def add_parser(subparsers: "Subparsers") -> None:
    """Add the command `workload` and its two."""
    parser = subparsers.add_parser(
        "workload",
        help="describe a workload in numbers, or save its requests",
        description="Describe the requests that a workload sends, or write them to a file.",
        epilog=_EXAMPLES,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    described = commands.add_parser("describe", help="counts, lengths, gaps, shared prefixes, KV")
    described.set_defaults(run=run_describe)
    _add_flags(described)
    described.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw histograms into this .png, .svg or .pdf"
    )
    saved = commands.add_parser("save", help="write requests to a file that trace:FILE reads")
    saved.set_defaults(run=run_save)
    _add_flags(saved)
    saved.add_argument(
        "--output",
        "-o",
        type=Path,
        required=True,
        metavar="FILE",
        help="file to write the requests to, as JSON lines",
    )


def run_describe(args: argparse.Namespace) -> int:
    """Draw if asked to, print tables, and return 0."""
    from loong.launcher.workload.tables import print_description  # these import what `--help` can do without
    from loong.workloads.workload import pace_of

    requests = _requests(args)
    if args.plot is not None:
        _plot(args.workload, requests, args.plot)
    pace = pace_of(args.workload, args.request_rate, args.burstiness)
    print_description(args.workload, requests, args.seed, args.length_scale, pace.max_concurrency)
    return 0


def run_save(args: argparse.Namespace) -> int:
    """Write the requests, and return 0."""
    from loong.workloads.datasets.saved import save_requests

    requests = _requests(args)
    try:
        num_requests = save_requests(args.output, requests)
    except OSError as error:
        raise ConfigError(f"--output {args.output} cannot be written: {error.strerror}") from error
    print(f"Wrote {num_requests:,} requests to {args.output}")
    return 0


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", metavar="SPEC", help="workload spec, as for `loong bench --workload`")
    parser.add_argument(
        "--num-requests",
        type=positive,
        metavar="N",
        help=f"number of requests ({DEFAULT_NUMBER}, or as many as a file has)",
    )
    parser.add_argument("--request-rate", type=float, help="requests per second (the workload's own)")
    add_drawing_flags(parser)


def _requests(args: argparse.Namespace) -> "list[WorkloadRequest]":
    from loong.workloads.workload import endless_workload

    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed} is below 0")
    drawn = endless_workload(
        args.workload,
        seed=args.seed,
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        length_scale=args.length_scale,
        output_scale=args.output_scale,
    )
    requests = list(islice(drawn, args.num_requests or DEFAULT_NUMBER))
    if args.num_requests is not None and len(requests) < args.num_requests:
        raise ConfigError(
            f"--num-requests {args.num_requests} is more than the {len(requests)} that {args.workload} has"
        )
    return requests


def _plot(workload: str, requests: "list[WorkloadRequest]", path: Path) -> None:
    from loong.workloads.plots.workload import plot_workload

    try:
        plot_workload(workload, requests, path)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--plot {path}: {error}") from error
