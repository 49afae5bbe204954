"""Policies under workloads, on servers or in virtual time, for scripts that measure whole services."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from line_picture import Line, Panel
from loong_runs import Document, Point, points_of, run_loong, server_arguments, shared_arguments

from loong.runs.run_tables import NOT_RUN, rate_found
from loong.workloads.report.report import table

SLO_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
NORMALIZED = ("normalized", "normalized_input", "normalized_output")
SETTING = (
    "model",
    "device",
    "num_instances",
    "kv_cache_tokens",
    "length_scale",
    "num_requests",
    "duration",
    "slo",
    "seed",
    "repeat",
)
WORDS = {
    "normalized": "E2EL a token",
    "normalized_input": "TTFT a prompt token",
    "normalized_output": "the rest an output token",
}


def add_serving_flags(parser: argparse.ArgumentParser, policies: str, workloads: Sequence[str]) -> None:
    """Add the flags for the policies, the load, the rates, and the device."""
    parser.add_argument("--policy", default=policies, help="policies to compare (%(default)s)")
    parser.add_argument(
        "--workload", nargs="+", default=list(workloads), help="workloads to send (%(default)s)"
    )
    parser.add_argument(
        "--device", default="h200", help="cuda or cpu: serve on these; h200, a800 ...: simulate (%(default)s)"
    )
    parser.add_argument("--model", help="a built-in shape (llama-3.1-8b, and on CPUs the tiny one)")
    parser.add_argument("--num-instances", type=int, default=8, help="number of instances (%(default)s)")
    parser.add_argument(
        "--kv-cache-tokens", type=int, help="tokens of KV on each instance (as many as fit into memory)"
    )
    parser.add_argument("--length-scale", default="1", help="factor that multiplies lengths (%(default)s)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--num-requests", type=int, help="number of requests of each run, instead of --duration"
    )
    length.add_argument(
        "--duration",
        type=float,
        default=60.0,
        help="duration of the arrivals of a run, in seconds (%(default)s)",
    )
    parser.add_argument(
        "--request-rate",
        help="requests per second, such as 1,2,4 (search the goodput; on servers from 1 a second on)",
    )
    parser.add_argument("--slo", default="loongserve-12", help="SLO rule (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (%(default)s)")
    parser.add_argument(
        "--repeat", type=int, default=1, help="number of repetitions on servers (%(default)s)"
    )
    parser.add_argument("--extra-server-args", default="", help="more flags for `loong serve`, as one word")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder for documents and pictures")


@dataclass(frozen=True, slots=True)
class Served:
    """The results of one workload."""

    workload: str
    document: Document
    points: tuple[Point, ...]

    @property
    def policies(self) -> list[str]:
        """Return the policies in the order in which they ran."""
        return list(dict.fromkeys(run["policy"] for run in self.document["runs"]))

    def goodputs(self) -> dict[str, float]:
        """Return the highest rate at which each policy attains, 0 if none was low enough."""
        return {found["policy"]: found["request_rate"] for found in self.document["goodput"]}

    def reported_goodput(self, policy: str) -> str:
        """Return the goodput in words, with whether a higher or lower rate would have to be tried."""
        for found in self.document["goodput"]:
            if found["policy"] == policy:
                return rate_found(found["request_rate"], found["too_high_rate"])
        return NOT_RUN

    def line(self, policy: str, key: str, factor: float = 1.0) -> Line:
        """Return a number over the rate."""
        found = [(point.rate, point.median(key)) for point in self.points if point.policy == policy]
        return [(rate, factor * value) for rate, value in found if value is not None]


def serve(args: argparse.Namespace, workload: str) -> Served:
    """Run every policy under a workload."""
    is_served = args.device in ("cpu", "cuda")
    if args.model is None and args.device != "cpu":
        args.model = "llama-3.1-8b"
    arguments = shared_arguments(args, workload)
    if args.request_rate is None:
        arguments.append("--find-goodput")
    if rate := args.request_rate or ("1" if is_served else None):
        arguments += ["--request-rate", rate]
    room = [] if args.kv_cache_tokens is None else ["--kv-cache-tokens", str(args.kv_cache_tokens)]
    if is_served:
        arguments += server_arguments(args, room)
    else:
        arguments += ["--device", args.device, "--jobs", str(len(os.sched_getaffinity(0))), *room]
    folder = args.output_dir / workload
    document = run_loong("bench" if is_served else "simulate", arguments, folder)
    return Served(workload, document, tuple(points_of(document)))


def attainment_panel(served: Served) -> Panel:
    """Plot attainment over rate, in percent."""
    lines = {policy: served.line(policy, "slo_attainment", 100.0) for policy in served.policies}
    return Panel(
        f"{served.workload}: SLO attainment",
        "requests per second",
        "of all requests (%)",
        _known(lines),
        90.0,
        is_share=True,
    )


def scale_panel(served: Served) -> Panel:
    """Plot attainment over the scale of the SLO, at the highest rate that all policies completed."""
    rates = [{p.rate for p in served.points if p.policy == policy} for policy in served.policies]
    shared = set.intersection(*rates) or {min(point.rate for point in served.points)}
    rate = max(shared)
    lines = {
        point.policy: [(scale, 100 * point.attainment_at(scale)) for scale in SLO_SCALES]
        for point in served.points
        if point.rate == rate
    }
    return Panel(
        f"{served.workload}: at {rate:.3g} requests/s",
        "scale of the SLO",
        "of all requests (%)",
        lines,
        90.0,
        is_share=True,
    )


def latency_panels(served: Served) -> list[Panel]:
    """Plot mean latencies per token over rate, as LoongServe does."""
    return [
        Panel(
            f"{served.workload}: {WORDS[name]}",
            "requests per second",
            "mean",
            _known({policy: served.line(policy, f"mean_{name}_ms") for policy in served.policies}),
            has_log_times=True,
        )
        for name in NORMALIZED
    ]


def numbers_of(args: argparse.Namespace, results: Sequence[Served]) -> dict[str, object]:
    """Return the settings of a result, and the goodputs."""
    setting = {name: getattr(args, name) for name in SETTING}
    return {**setting, "goodputs": {served.workload: served.goodputs() for served in results}}


def goodput_table(args: argparse.Namespace, results: Sequence[Served]) -> str:
    """Return a table of P90 goodput, a row a workload and a column a policy, also for those without a run."""
    policies = args.policy.split(",")
    rows = [(served.workload, *map(served.reported_goodput, policies)) for served in results]
    return table(("goodput, req/s", *policies), rows)


def _known(lines: dict[str, Line]) -> dict[str, Line]:
    return {name: line for name, line in lines.items() if line}
