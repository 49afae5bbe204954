"""What a benchmark tells: blocks and tables on the way, and files and one line of JSON at the end."""

import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from loong.launcher.bench_config import BenchConfig, LoadConfig, Server
from loong.launcher.embedded import ServerConfig
from loong.launcher.machine import machine_facts
from loong.launcher.measure import Measurement
from loong.workloads.metrics import Metrics
from loong.workloads.plot_style import is_available
from loong.workloads.plot_timeline import plot_timelines
from loong.workloads.report import format_buckets, format_comparison, format_counters, format_run
from loong.workloads.result import JSON, result_json
from loong.workloads.workload import origin_of

SUMMARY_KEYS = (
    "completed",
    "failed",
    "duration",
    "request_throughput",
    "output_throughput",
    "request_goodput",
    "slo_attainment",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_tpot_ms",
)


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """A measurement of one policy, what it ran on, and its numbers."""

    policy: str
    server: Server
    measurement: Measurement
    metrics: Metrics

    def as_json(self) -> dict[str, JSON]:
        """Return the run under vLLM's keys, with its server and the server's counters."""
        counters = self.measurement.counters
        by_dop: dict[str, JSON] | None = None
        if counters.num_batches_by_dop is not None:
            by_dop = {str(dop): count for dop, count in counters.num_batches_by_dop.items()}
        return {
            "policy": self.policy,
            "server": _server_json(self.server),
            **result_json(self.metrics, self.measurement.records),
            "num_batches_by_dop": by_dop,
            "num_scale_ups": counters.num_scale_ups,
            "num_scale_downs": counters.num_scale_downs,
            "num_retained_tokens": counters.num_retained_tokens,
            "num_migrated_tokens": counters.num_migrated_tokens,
        }


def print_workload(load: LoadConfig) -> None:
    """Print what is sent; it says whether lengths are drawn or read from a file."""
    pace = "all at once"
    if load.request_rate < math.inf:
        spread = "replayed" if load.burstiness is None else f"burstiness {load.burstiness:g}"
        pace = f"at {load.request_rate:g} req/s ({spread})"
    if load.max_concurrency is not None:
        pace += f", at most {load.max_concurrency} in flight"
    print(
        f"Workload: {load.workload} ({origin_of(load.workload)}, scale {load.length_scale:g}), "
        f"{load.num_requests} requests {pace}, seed {load.seed}\n"
    )


def print_run(run: PolicyRun, config: BenchConfig) -> None:
    """Print one policy's block and tables."""
    blocks = [format_run(run.policy, run.metrics, config.slo.describe()), format_buckets(run.metrics)]
    counters = format_counters(run.measurement.counters)
    errors = [r.error for r in run.measurement.records if r.error is not None]
    if counters:
        blocks.append(counters)
    if errors:
        blocks.append(f"First of {len(errors)} errors: {errors[0]}")
    print("\n\n".join(blocks), end="\n\n")


def report(runs: Sequence[PolicyRun], config: BenchConfig, command: str) -> None:
    """Compare at least one run, write the files that were asked for, and print one line of JSON."""
    _print_comparison(runs)
    if config.output_dir is not None:
        _write_files(config.output_dir, runs, _results(runs, config, command))
    measured = {run.policy for run in runs}
    if missing := [policy for policy in config.servers if policy not in measured]:
        print(f"Not measured: {', '.join(missing)}", file=sys.stderr)
    print(msgspec.json.encode(_summary(runs, config)).decode())


def _print_comparison(runs: Sequence[PolicyRun]) -> None:
    first = runs[0]
    probe = first.measurement.probe
    if probe is not None:
        lengths = ", ".join(str(length) for length in probe.num_prompt_tokens)
        print(f"Unloaded prefill of n tokens: {probe.fit.describe()} ({first.policy}, probed at {lengths})\n")
    if len(runs) > 1:
        print(format_comparison({run.policy: run.metrics for run in runs}), end="\n\n")


def _results(runs: Sequence[PolicyRun], config: BenchConfig, command: str) -> dict[str, JSON]:
    probe = runs[0].measurement.probe
    return {
        "command": _without_keys(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": dict(machine_facts()),
        "configuration": _configuration(config),
        "prefill_probe": None if probe is None else msgspec.to_builtins(probe),
        "runs": [run.as_json() for run in runs],
    }


def _configuration(config: BenchConfig) -> dict[str, JSON]:
    """Return what was asked for; infinities are words, as JSON has no number for them."""
    load: dict[str, JSON] = {
        name: "inf" if value == math.inf else value
        for name, value in msgspec.to_builtins(config.load).items()
    }
    return {**load, "slo": config.slo.describe(), "policies": list(config.servers)}


def _server_json(server: Server) -> dict[str, JSON]:
    fields: dict[str, JSON] = msgspec.to_builtins(server)
    if isinstance(server, ServerConfig):
        fields["extra_arguments"] = _without_keys(shlex.join(server.extra_arguments))
    return fields


def _without_keys(command: str) -> str:
    """Return a command line with the values of `--api-key` hidden."""
    return re.sub(r"(--api[-_]key[= ])\S+", r"\1***", command)


def _write_files(folder: Path, runs: Sequence[PolicyRun], results: dict[str, JSON]) -> None:
    written = [folder / "results.json"]
    written[0].write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
    timelines = {run.policy: run.measurement.history for run in runs if run.measurement.history is not None}
    if not timelines:
        print("No picture: the server has no /trace.", file=sys.stderr)
    elif not is_available():
        print("No picture: matplotlib is not installed; pip install 'loong[bench]'.", file=sys.stderr)
    else:
        pictures = [folder / "timeline.png", folder / "timeline.svg"]
        plot_timelines(timelines, pictures)
        written += pictures
    written += [folder / f"server-{run.policy}.log" for run in runs if isinstance(run.server, ServerConfig)]
    print(f"Wrote {', '.join(map(str, written))}", file=sys.stderr)


def _summary(runs: Sequence[PolicyRun], config: BenchConfig) -> dict[str, JSON]:
    return {
        "workload": config.load.workload,
        "num_requests": config.load.num_requests,
        "seed": config.load.seed,
        "slo": config.slo.name,
        "runs": {
            run.policy: {key: value for key, value in run.as_json().items() if key in SUMMARY_KEYS}
            for run in runs
        },
    }
