"""Flags of `loong serve` for logs, traces and recordings."""

import argparse
from pathlib import Path

from loong.processes.logs import FORMATS


def add_record_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags for logs, traces and recordings."""
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="collector for OpenTelemetry spans, such as http://localhost:4318/v1/traces (none)",
    )
    group.add_argument(
        "--log-format", choices=FORMATS, default="text", help="format of the log (%(default)s)"
    )
    group.add_argument(
        "--decision-log",
        type=Path,
        metavar="FILE",
        help="append all plans and their reasons to this file, for `loong explain`",
    )
    group.add_argument(
        "--event-log",
        type=Path,
        metavar="FILE",
        help="write all events and plans to this file, for `loong simulate --replay`",
    )
    group.add_argument(
        "--event-log-prompts",
        action="store_true",
        help="record token ids of prompts in --event-log (only their number)",
    )
    group.add_argument(
        "--kv-events-config",
        metavar="JSON",
        help="publish what the prefix cache stores and removes over ZeroMQ, for routers: an object with the "
        'names of vLLM, such as \'{"endpoint": "tcp://*:5557"}\' (none)',
    )
    group.add_argument(
        "--trace-dir",
        type=Path,
        metavar="DIR",
        help="folder for traces of workers, which POST /start_profile and /stop_profile write (off)",
    )
