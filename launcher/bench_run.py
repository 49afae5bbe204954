"""Runs a benchmark: each server's measurements, one server after the other, then the report."""

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from time import perf_counter

from loong.launcher import goodput
from loong.launcher.bench_config import BenchConfig, ExternalServer, Server
from loong.launcher.bench_files import decision_log_name
from loong.launcher.bench_found import Found, MeasuredRun, Repeats
from loong.launcher.bench_report import print_run, print_workload, report
from loong.launcher.embedded import ServerConfig, embedded_server, sigterm_unwinds
from loong.launcher.goodput import Goodput
from loong.launcher.measured_server import MeasuredServer, PrefillProbe
from loong.launcher.other_work import processor_time, share_of_others
from loong.launcher.outputs import make_folder
from loong.launcher.runs import Asked, max_misses_of
from loong.workloads.backends import Backend
from loong.workloads.metrics import compute_metrics
from loong.workloads.result import columns_json


def run_bench(config: BenchConfig, command: str) -> int:
    """Measure every server and report; return 1 if any request failed, else 0.

    If a later one cannot be measured, or we are told to stop, what was measured is reported all the same.

    Raises:
        ConfigError, ServerUnusableError: see `MeasuredServer` and `embedded_server`.
    """
    start = perf_counter()
    bench = _Bench(config)
    print_workload(config.load)
    try:
        bench.measure_all()
    finally:
        if bench.runs:
            found = Found(bench.runs, bench.goodputs, bench.probe, perf_counter() - start)
            report(found, config, command)
    return int(any(run.metrics.num_failed and not run.is_cut_off for run in bench.runs))


class _Bench:
    """What is found, server after server; the first one's probe serves for all."""

    def __init__(self, config: BenchConfig) -> None:
        self.runs: list[MeasuredRun] = []
        self.goodputs: list[Goodput[Repeats]] = []
        self.probe: PrefillProbe | None = None
        self._config = config
        self._first_requests = config.load.requests(max(config.load.rates), 0)

    def measure_all(self) -> None:
        """Measure each server, started for that if it is ours."""
        with sigterm_unwinds(), _output_folder(self._config) as folder:
            for name, server in self._config.servers.items():
                with _started(name, self._logging(name, server, folder), folder) as (
                    base_url,
                    model,
                    backend,
                ):
                    measured = MeasuredServer(base_url, model, self._config, backend)
                    asyncio.run(self._prepare(measured))
                    self._measure(name, server, measured)

    def _logging(self, name: str, server: Server, folder: Path) -> Server:
        """Return the server, which writes its decisions down where a report will tell them."""
        if isinstance(server, ExternalServer) or not self._config.keeps_decisions:
            return server
        flag = ("--decision-log", str(folder / decision_log_name(name)))
        return replace(server, extra_arguments=(*flag, *server.extra_arguments))

    async def _prepare(self, measured: MeasuredServer) -> None:
        await measured.warm_up(self._first_requests)
        if self.probe is None and self._config.slo.needs_prefill_time:
            self.probe = await measured.probe(self._first_requests)

    def _measure(self, name: str, server: Server, measured: MeasuredServer) -> None:
        config = self._config

        def attempt(rate: float) -> Repeats:
            repeats = range(config.num_repeats)
            return Repeats(rate, tuple(self._run(name, server, measured, rate, r) for r in repeats))

        if config.precision is not None:
            first_rate = max(config.load.rates)
            self.goodputs.append(goodput.search(name, config.slo, attempt, first_rate, config.precision))
        else:
            attempts = [attempt(rate) for rate in config.load.rates]
            if not config.is_single:
                self.goodputs.append(goodput.of_sweep(name, config.slo, attempts))

    def _run(
        self, name: str, server: Server, measured: MeasuredServer, rate: float, repeat: int
    ) -> MeasuredRun:
        """Measure once, and tell it."""
        config = self._config
        asked = Asked(name, config.slo, rate, config.goal, config.load.seed + repeat, repeat)
        requests = config.load.requests(rate, repeat)
        limits_of = config.slo.limits_of(None if self.probe is None else self.probe.fit)
        max_misses = max_misses_of(len(requests), asked) if config.precision is not None else inf
        before = processor_time()
        got = asyncio.run(measured.run(requests, limits_of, max_misses))
        others = share_of_others(before, processor_time())
        keeps_history = config.is_single and repeat == 0
        run = MeasuredRun(
            asked,
            compute_metrics(got.records, limits_of, length_scale=config.load.length_scale),
            columns_json(got.records, limits_of),
            got.counters,
            got.is_cut_off,
            server,
            got.history if keeps_history else None,
            others if isinstance(server, ServerConfig) else None,
        )
        self.runs.append(run)
        print_run(run, config)
        return run


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
def _started(name: str, server: Server, folder: Path) -> Iterator[tuple[str, str | None, Backend]]:
    """Yield the base URL of the server to measure, the model to ask it for (None: its first), and its API."""
    if isinstance(server, ExternalServer):
        yield server.base_url, server.model, server.backend
        return
    size = f"--num-instances {server.num_instances} --tensor-parallel-size {server.tensor_parallel_size}"
    print(f"Starting a server with --policy {name} {size} ...", file=sys.stderr)
    with embedded_server(server, name, folder / f"server-{name}.log") as base_url:
        yield base_url, None, Backend.OPENAI
