"""The flags of `loong simulate`, except those about planning."""

import argparse
from pathlib import Path

from loong.hardware.devices import DEVICES
from loong.hardware.memory import MAX_AUTO_TOKENS
from loong.launcher.config_flags import FieldFlag, add_field_flags
from loong.launcher.flags import (
    add_class_flag,
    add_goal_flags,
    add_memory_instance_flags,
    add_output_flags,
    add_workload_flags,
    or_auto,
    part,
    positive,
    ratio,
    seconds,
    token_count,
)
from loong.launcher.policy_flags import COMPARED_WORDS, policy_names
from loong.launcher.simulate.chosen_hardware import DEFAULT_DEVICE, DEFAULT_MODEL
from loong.launcher.window_flag import add_window_flag
from loong.model.shapes import SHAPES
from loong.simulation.config import DEFAULT_DURATION, MIN_REQUESTS, Host
from loong.workloads.metrics.slo import RULE_NAMES

DEFAULT_SLO = "tight"
SWEPT_SHARES = (0.25, 0.5, 1.0, 1.5)  # of the predicted capacity
DEFAULT_PRECISION = 0.05
HOST_FLAGS = (
    FieldFlag("num_cores", positive, "N", "CPU cores that all instances share", "each instance has its own"),
    FieldFlag("plan_time", seconds, "S", "time from an event to the instructions it leads to", "0"),
    FieldFlag(
        "noise", part, "X", "relative spread of batch times around their predictions, such as 0.12", "0"
    ),
)


def add_cluster_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the simulated cluster and its speed."""
    _add_model_flags(group)
    _add_instance_flags(group)
    group.add_argument(
        "--cost-model",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="cost model of `loong profile`, one for each --tensor-parallel-size (the device's roofline)",
    )
    add_field_flags(group, Host, HOST_FLAGS)


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--policy",
        type=policy_names,
        metavar="P,P",
        help=f"policies to simulate (esp; where no rate is given, {COMPARED_WORDS})",
    )
    group.add_argument(
        "--model",
        help=f"model: a Hugging Face folder, or {', '.join(SHAPES)} (the cost model's, or {DEFAULT_MODEL})",
    )
    group.add_argument(
        "--device", help=f"device to simulate: {', '.join(DEVICES)} (the cost model's, or {DEFAULT_DEVICE})"
    )


def _add_instance_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--num-instances",
        "--instances",
        type=positive,
        default=8,
        metavar="N",
        help="number of instances (%(default)s)",
    )
    group.add_argument(
        "--num-hosts",
        type=positive,
        default=1,
        metavar="N",
        help="number of hosts, over which instances are spread evenly (%(default)s)",
    )
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=positive,
        metavar="N",
        help="devices of each instance (the cost model's, or 1)",
    )
    group.add_argument(
        "--kv-cache-tokens",
        type=token_count,
        metavar="N",
        help=f"tokens of KV on each instance (auto: as many as fit, on CPUs at most {MAX_AUTO_TOKENS})",
    )
    add_window_flag(group, "with --policy esp, on any device, though `loong serve` does so on CPUs alone")
    add_memory_instance_flags(group, "as many as fit")
    group.add_argument("--memory-device", help="device of memory instances (the same)")
    group.add_argument(
        "--host-kv-tokens",
        type=token_count,
        default=0,
        metavar="N",
        help="tokens of KV that each instance also has in memory of its host (none)",
    )


def add_load_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the load."""
    add_workload_flags(group)
    group.add_argument(
        "--rate",
        "--request-rate",
        metavar="R",
        help="requests per second: 2, or 1,2,4, or 2:8:0.5 (auto: the workload's own pace; if it has none, "
        f"{', '.join(f'{share:g}' for share in SWEPT_SHARES)} times the predicted capacity)",
    )
    group.add_argument(
        "--declared-tokens",
        type=positive,
        default=0,
        metavar="N",
        help="max_tokens that requests declare at least, though their answers end as the workload says (the "
        "length of the answer)",
    )
    lengths = group.add_mutually_exclusive_group()
    lengths.add_argument(
        "--num-requests",
        type=or_auto(positive),
        metavar="N",
        help=f"number of requests to send (auto: {MIN_REQUESTS} where rates are chosen, else see --duration)",
    )
    lengths.add_argument(
        "--duration",
        type=seconds,
        metavar="S",
        help=f"measure what arrives in this time, at least {MIN_REQUESTS} requests, and send more after them "
        f"({DEFAULT_DURATION:g})",
    )


def add_report_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the SLO and the output."""
    group.add_argument(
        "--slo",
        action="append",
        metavar="RULE",
        help=f"SLO rule: {', '.join(RULE_NAMES)}, one of these with other targets such as tight,tpot:10, or "
        f"bounds in ms such as 'ttft:2000 tpot:50'; may be given repeatedly ({DEFAULT_SLO})",
    )
    add_goal_flags(group)
    add_class_flag(group)
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
    group.add_argument(
        "--jobs",
        type=or_auto(positive),
        metavar="N",
        help="number of processes that simulate in parallel (auto: one a core, at most one a run)",
    )
    add_output_flags(group)


def add_log_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the logs of one run."""
    group.add_argument(
        "--event-log", type=Path, metavar="FILE", help="write all events and plans to this file, for --replay"
    )
    group.add_argument(
        "--decision-log",
        type=Path,
        metavar="FILE",
        help="write all plans and their reasons to this file, for `loong explain`",
    )
    group.add_argument(
        "--replay",
        type=Path,
        metavar="FILE",
        help="plan again on the events of this event log and compare, instead of simulating",
    )
