"""Runs a benchmark: one measurement a policy, each on a server of its own, then the report."""

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from loong.launcher.bench_config import BenchConfig, ExternalServer, Server
from loong.launcher.bench_report import PolicyRun, print_run, print_workload, report
from loong.launcher.embedded import embedded_server
from loong.launcher.measure import PrefillProbe, measure
from loong.launcher.outputs import make_folder
from loong.workloads.metrics import compute_metrics
from loong.workloads.workload import make_workload


def run_bench(config: BenchConfig, command: str) -> int:
    """Measure every policy and report; return 1 if any request failed, else 0.

    If a later policy cannot be measured, or we are told to stop, what was measured is reported all the same.

    Raises:
        ConfigError, ServerUnusableError: see `measure` and `embedded_server`.
    """
    runs: list[PolicyRun] = []
    try:
        for run in _measured(config):
            runs.append(run)
            print_run(run, config)
    finally:
        if runs:
            report(runs, config, command)
    return int(any(run.metrics.num_failed for run in runs))


def _measured(config: BenchConfig) -> Iterator[PolicyRun]:
    """Measure one policy after the other; the first one's probe serves for all."""
    load = config.load
    requests = make_workload(
        load.workload,
        load.num_requests,
        seed=load.seed,
        request_rate=load.request_rate,
        burstiness=load.burstiness,
        length_scale=load.length_scale,
    )
    print_workload(load)
    probe: PrefillProbe | None = None
    with _output_folder(config) as folder:
        for policy, server in config.servers.items():
            with _started(policy, server, folder) as (base_url, model):
                measurement = asyncio.run(measure(base_url, model, config, requests, probe))
            probe = measurement.probe
            limits_of = measurement.limits_of(config)
            metrics = compute_metrics(measurement.records, limits_of, length_scale=load.length_scale)
            yield PolicyRun(policy, server, measurement, metrics)


@contextlib.contextmanager
def _output_folder(config: BenchConfig) -> Iterator[Path]:
    """Yield where server logs go: the output folder, or one that is gone afterwards."""
    if config.output_dir is None:
        with tempfile.TemporaryDirectory(prefix="loong-bench-") as folder:
            yield Path(folder)
        return
    make_folder("--output-dir", config.output_dir)
    yield config.output_dir


@contextlib.contextmanager
def _started(policy: str, server: Server, folder: Path) -> Iterator[tuple[str, str | None]]:
    """Yield the base URL of the server to measure, and the model to ask it for (None: its first)."""
    if isinstance(server, ExternalServer):
        yield server.base_url, server.model
        return
    size = f"--num-instances {server.num_instances} --tensor-parallel-size {server.tensor_parallel_size}"
    print(f"Starting a server with --policy {policy} {size} ...", file=sys.stderr)
    with embedded_server(server, policy, folder / f"server-{policy}.log") as base_url:
        yield base_url, None
