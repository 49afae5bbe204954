"""Runs a benchmark: one measurement a policy, then the report, the picture and the files."""

import asyncio
import contextlib
import math
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from loong.core.errors import ConfigError
from loong.launcher.bench_config import BenchConfig, ExternalServer, LoadConfig
from loong.launcher.embedded import ServerConfig, embedded_server
from loong.launcher.machine import machine_facts
from loong.launcher.measure import Measurement, PrefillProbe, measure
from loong.workloads.metrics import Metrics, compute_metrics
from loong.workloads.plot import is_available, plot_timelines
from loong.workloads.report import format_buckets, format_comparison, format_counters, format_run
from loong.workloads.result import JSON, result_json
from loong.workloads.workload import make_workload

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
    """A measurement and its numbers."""

    measurement: Measurement
    metrics: Metrics

    def as_json(self) -> dict[str, JSON]:
        """Return the run under vLLM's keys, with the server's counters."""
        counters = self.measurement.counters
        by_dop: dict[str, JSON] | None = None
        if counters.num_batches_by_dop is not None:
            by_dop = {str(dop): count for dop, count in counters.num_batches_by_dop.items()}
        return {
            **result_json(self.metrics, self.measurement.records),
            "num_batches_by_dop": by_dop,
            "num_scale_ups": counters.num_scale_ups,
            "num_scale_downs": counters.num_scale_downs,
            "num_retained_tokens": counters.num_retained_tokens,
            "num_migrated_tokens": counters.num_migrated_tokens,
        }


def run_bench(config: BenchConfig, command: str) -> int:
    """Measure every policy and report; return 1 if any request failed, else 0.

    Raises:
        ConfigError, ServerUnusableError: see `measure` and `embedded_server`.
    """
    load = config.load
    requests = make_workload(
        load.workload,
        load.num_requests,
        seed=load.seed,
        request_rate=load.request_rate,
        burstiness=load.burstiness,
        length_scale=load.length_scale,
    )
    print(f"Workload: {_workload(load)}\n")
    runs: dict[str, PolicyRun] = {}
    probe: PrefillProbe | None = None
    with _output_folder(config) as folder:
        for policy in config.policies:
            with _server(config, policy, folder) as (base_url, model):
                measurement = asyncio.run(measure(base_url, model, config, requests, probe))
            probe = measurement.probe
            metrics = compute_metrics(
                measurement.records, measurement.limits_of(config), length_scale=load.length_scale
            )
            runs[policy] = PolicyRun(measurement, metrics)
            _print_run(policy, runs[policy], config)
    _print_comparison(runs)
    results = _results(runs, config, command)
    if config.output_dir is not None:
        _write_files(config.output_dir, runs, results)
    print(msgspec.json.encode(_summary(runs, config)).decode())
    return int(any(run.metrics.num_failed for run in runs.values()))


@contextlib.contextmanager
def _output_folder(config: BenchConfig) -> Iterator[Path]:
    """Yield where server logs go: the output folder, or one that is gone afterwards."""
    if config.output_dir is None:
        with tempfile.TemporaryDirectory(prefix="loong-bench-") as folder:
            yield Path(folder)
        return
    try:
        config.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output-dir {config.output_dir} cannot be made: {error}") from error
    yield config.output_dir


@contextlib.contextmanager
def _server(config: BenchConfig, policy: str, folder: Path) -> Iterator[tuple[str, str | None]]:
    """Yield the base URL of the server to measure, and the model to ask it for (None: its first)."""
    if isinstance(config.server, ExternalServer):
        yield config.server.base_url, config.server.model
        return
    print(f"Starting a server with --policy {policy} ...", file=sys.stderr)
    with embedded_server(config.server, policy, folder / f"server-{policy}.log") as base_url:
        yield base_url, None


def _workload(load: LoadConfig) -> str:
    """Return what is sent, for a report; it says that lengths are drawn and not read from a data set."""
    pace = "all at once"
    if load.request_rate < math.inf:
        pace = f"at {load.request_rate:g} req/s (burstiness {load.burstiness:g})"
    if load.max_concurrency is not None:
        pace += f", at most {load.max_concurrency} in flight"
    return (
        f"{load.workload} (lengths from built-in distributions, scale {load.length_scale:g}), "
        f"{load.num_requests} requests {pace}, seed {load.seed}"
    )


def _print_run(policy: str, run: PolicyRun, config: BenchConfig) -> None:
    blocks = [format_run(policy, run.metrics, config.slo.describe()), format_buckets(run.metrics)]
    counters = format_counters(run.measurement.counters)
    errors = [r.error for r in run.measurement.records if r.error is not None]
    if counters:
        blocks.append(counters)
    if errors:
        blocks.append(f"First of {len(errors)} errors: {errors[0]}")
    print("\n\n".join(blocks), end="\n\n")


def _print_comparison(runs: Mapping[str, PolicyRun]) -> None:
    first = next(iter(runs))
    probe = runs[first].measurement.probe
    if probe is not None:
        lengths = ", ".join(str(length) for length in probe.num_prompt_tokens)
        print(f"Unloaded prefill of n tokens: {probe.fit.describe()} ({first}, probed at {lengths})\n")
    if len(runs) > 1:
        print(format_comparison({policy: run.metrics for policy, run in runs.items()}), end="\n\n")


def _results(runs: Mapping[str, PolicyRun], config: BenchConfig, command: str) -> dict[str, JSON]:
    probe = next(iter(runs.values())).measurement.probe
    return {
        "command": _without_keys(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": dict(machine_facts()),
        "configuration": _configuration(config),
        "prefill_probe": None if probe is None else msgspec.to_builtins(probe),
        "runs": [{"policy": policy, **run.as_json()} for policy, run in runs.items()],
    }


def _configuration(config: BenchConfig) -> dict[str, JSON]:
    """Return what was asked for; infinities are words, as JSON has no number for them, and keys stay out."""
    load: dict[str, JSON] = {
        name: "inf" if value == math.inf else value
        for name, value in msgspec.to_builtins(config.load).items()
    }
    server: dict[str, JSON] = msgspec.to_builtins(config.server)
    if isinstance(config.server, ServerConfig):
        server["extra_arguments"] = _without_keys(shlex.join(config.server.extra_arguments))
    return {**load, "slo": config.slo.describe(), "server": server}


def _without_keys(command: str) -> str:
    """Return a command line with the values of `--api-key` hidden."""
    return re.sub(r"(--api[-_]key[= ])\S+", r"\1***", command)


def _write_files(folder: Path, runs: Mapping[str, PolicyRun], results: dict[str, JSON]) -> None:
    (folder / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
    timelines = {
        policy: run.measurement.timeline
        for policy, run in runs.items()
        if run.measurement.timeline is not None
    }
    if not timelines:
        print("No picture: the server has no /trace.", file=sys.stderr)
    elif not is_available():
        print("No picture: matplotlib is not installed; pip install 'loong[bench]'.", file=sys.stderr)
    else:
        plot_timelines(timelines, [folder / "timeline.png", folder / "timeline.svg"])
    print(f"Wrote {', '.join(sorted(str(path) for path in folder.iterdir()))}", file=sys.stderr)


def _summary(runs: Mapping[str, PolicyRun], config: BenchConfig) -> dict[str, JSON]:
    return {
        "workload": config.load.workload,
        "num_requests": config.load.num_requests,
        "seed": config.load.seed,
        "slo": config.slo.name,
        "runs": {
            policy: {key: value for key, value in run.as_json().items() if key in SUMMARY_KEYS}
            for policy, run in runs.items()
        },
    }
