"""The flags of `loong simulate`, but for those about planning."""

import argparse
from pathlib import Path

from loong.launcher.flags import (
    add_goal_flags,
    add_workload_flags,
    part,
    positive,
    ratio,
    seconds,
    token_count,
)
from loong.launcher.memory import MAX_AUTO_TOKENS
from loong.launcher.simulate.chosen_hardware import DEFAULT_DEVICE, DEFAULT_MODEL
from loong.launcher.simulate.config import DEFAULT_DURATION
from loong.model.shapes import SHAPES
from loong.scheduler.roofline import DEVICES
from loong.workloads.slo import RULE_NAMES

DEFAULT_SLO = "tight"
DEFAULT_PRECISION = 0.05


def add_cluster_flags(group: argparse._ArgumentGroup) -> None:
    """What is simulated, and how quick it is."""
    group.add_argument("--policy", default="esp", metavar="P,P", help="simulated one by one (%(default)s)")
    group.add_argument(
        "--model",
        help=f"a Hugging Face folder, or {', '.join(SHAPES)} (the cost model's, or {DEFAULT_MODEL})",
    )
    group.add_argument("--device", help=f"{', '.join(DEVICES)} (the cost model's, or {DEFAULT_DEVICE})")
    group.add_argument(
        "--num-instances", "--instances", type=positive, default=8, metavar="N", help="(%(default)s)"
    )
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=positive,
        metavar="N",
        help="devices an instance (the cost model's, or 1)",
    )
    group.add_argument(
        "--kv-cache-tokens",
        type=token_count,
        metavar="N",
        help=f"an instance's KV pool (what memory holds, on processors at most {MAX_AUTO_TOKENS})",
    )
    group.add_argument(
        "--cost-model",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="from `loong profile`; one for each number of devices an instance (the device's roofline)",
    )
    group.add_argument(
        "--num-cores", type=positive, metavar="N", help="CPU instances share these cores (each has its own)"
    )
    group.add_argument(
        "--plan-time", type=seconds, metavar="S", help="from an event to what it leads to (no time)"
    )
    group.add_argument(
        "--noise",
        type=part,
        metavar="X",
        help="batches take about this part more or less time than predicted, as 0.12 (as predicted)",
    )


def add_load_flags(group: argparse._ArgumentGroup) -> None:
    """What is sent."""
    add_workload_flags(group)
    group.add_argument(
        "--rate",
        "--request-rate",
        metavar="R",
        help="requests per second: 2, or 1,2,4, or 2:8:0.5 (the workload's own pace, if it has one)",
    )
    lengths = group.add_mutually_exclusive_group()
    lengths.add_argument("--num-requests", type=positive, metavar="N", help="send so many, and no more")
    lengths.add_argument(
        "--duration",
        type=seconds,
        default=DEFAULT_DURATION,
        metavar="S",
        help="measure what arrives in this time, at least 200 requests, and send more behind (%(default)g)",
    )


def add_report_flags(group: argparse._ArgumentGroup) -> None:
    """What is asked of the runs, and where it goes."""
    group.add_argument(
        "--slo",
        action="append",
        metavar="RULE",
        help=f"{', '.join(RULE_NAMES)}, or bounds in ms such as 'ttft:2000 tpot:50'; may be given "
        f"repeatedly ({DEFAULT_SLO})",
    )
    add_goal_flags(group)
    group.add_argument(
        "--goodput",
        "--find-goodput",
        type=ratio,
        nargs="?",
        const=DEFAULT_PRECISION,
        metavar="X",
        help="search the highest rate at which enough meet their SLO, to this relative precision "
        f"({DEFAULT_PRECISION})",
    )
    group.add_argument("--jobs", type=positive, default=1, metavar="N", help="processes (%(default)s)")
    group.add_argument(
        "--output-dir", type=Path, metavar="DIR", help="write results.json, report.html, pictures and traces"
    )


def add_log_flags(group: argparse._ArgumentGroup) -> None:
    """What one run writes down."""
    group.add_argument("--event-log", type=Path, metavar="FILE", help="record the run, for --replay")
    group.add_argument(
        "--decision-log", type=Path, metavar="FILE", help="what is decided and why, for `loong explain`"
    )
    group.add_argument(
        "--replay",
        type=Path,
        metavar="FILE",
        help="simulate nothing: plan again on the events of an event log, and compare",
    )
