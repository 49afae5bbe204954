"""Runs a benchmark: each server's measurements, one server after the other, then the report."""

import asyncio
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import assert_never

from loong.launcher.bench.config import BenchConfig, ExternalServer, Server
from loong.launcher.bench.files import decision_log_name, server_log_name
from loong.launcher.bench.found import BenchFindings, MeasuredRun, Repeats
from loong.launcher.bench.measured_server import MeasuredServer, Measurement, PrefillProbe
from loong.launcher.bench.progress import RunProgress
from loong.launcher.bench.report import print_run, print_workload, report
from loong.runs import goodput
from loong.runs.background_load import processor_time, share_of_others
from loong.runs.goodput import Goodput
from loong.runs.peer_server import PeerServer, spawn_peer
from loong.runs.run import RunKey, allowed_misses
from loong.runs.run_folder import run_folder
from loong.runs.shown_command import shown_command
from loong.runs.spawned_server import ServerConfig, sigterm_unwinds, spawn_server
from loong.workloads.client.backends import ServerApi
from loong.workloads.metrics.backlog import UsedCapacity, WorkOf, used_capacity
from loong.workloads.metrics.counters import ServerCounters
from loong.workloads.metrics.metrics import compute_metrics
from loong.workloads.metrics.misses import Misses
from loong.workloads.metrics.record import RequestRecord
from loong.workloads.metrics.result import columns_json
from loong.workloads.metrics.slo import LimitsOf
from loong.workloads.request import WorkloadRequest


def run_bench(config: BenchConfig, command: str) -> int:
    """Measure every server and report; return 1 if any request failed, else 0.

    If a later server cannot be measured, or the benchmark is interrupted, the earlier measurements are still
    reported.

    Raises:
        ConfigError, ServerUnusableError: see `MeasuredServer`, `spawn_server` and `spawn_peer`.
    """
    start = perf_counter()
    bench = _Bench(config)
    print_workload(config)
    with run_folder("bench", config.output_dir) as folder:
        try:
            bench.measure_all(folder)
        finally:
            if bench.runs:
                found = BenchFindings(bench.runs, bench.goodputs, bench.probe, perf_counter() - start)
                report(found, config, folder, command)
    return int(any(run.metrics.num_failed and not run.is_cut_off for run in bench.runs))


class _Bench:
    """The findings, server after server; the first server's probe serves for all."""

    def __init__(self, config: BenchConfig) -> None:
        self.runs: list[MeasuredRun] = []
        self.goodputs: list[Goodput[Repeats]] = []
        self.probe: PrefillProbe | None = None
        self._config = config
        self._first_requests = config.load.requests(max(config.load.rates), 0)

    def measure_all(self, folder: Path) -> None:
        """Measure each server, started for that unless it is there already; its logs go into the folder."""
        with sigterm_unwinds():
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
        """Return the server, made to write its decision log where a report will read it."""
        if not isinstance(server, ServerConfig) or not self._config.is_single:
            return server
        flag = ("--decision-log", str(folder / decision_log_name(name)))
        return replace(server, extra_arguments=(*flag, *server.extra_arguments))

    async def _prepare(self, measured: MeasuredServer) -> None:
        await measured.warm_up()
        is_weighed = self._config.is_per_class and self._config.work_of is None
        if self.probe is None and (self._config.slo.needs_prefill_time or is_weighed):
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
        """Measure once and print the result; if that is interrupted, print the requests that had ended."""
        config = self._config
        seed = config.load.seed + repeat
        asked = RunKey(name, config.slo, rate, config.goal, seed, repeat, config.is_per_class)
        requests = config.load.requests(rate, repeat)
        limits_of = config.slo.limits_of(None if self.probe is None else self.probe.fit)
        misses = Misses()
        if config.precision is not None:
            misses = allowed_misses(requests, asked, config.load.length_scale)
        before, progress = processor_time(), RunProgress(limits_of, misses)

        def keep(got: Measurement) -> MeasuredRun:
            others = share_of_others(before, processor_time())
            run = MeasuredRun(
                asked,
                compute_metrics(got.records, limits_of, length_scale=config.load.length_scale),
                columns_json(got.records, limits_of),
                got.counters,
                got.is_cut_off,
                self._used(name, got.records, limits_of),
                config.devices.get(name),
                server,
                got.history if config.is_single and repeat == 0 else None,
                None if isinstance(server, ExternalServer) else others,
                len(requests) - len(got.records),
            )
            self.runs.append(run)
            print_run(run, config)
            return run

        try:
            got = asyncio.run(measured.run(requests, progress))
        except (KeyboardInterrupt, SystemExit):
            if progress.records:
                keep(Measurement(progress.records, ServerCounters(), None))
            raise
        return keep(got)

    def _used(self, name: str, records: Sequence[RequestRecord], limits_of: LimitsOf) -> UsedCapacity | None:
        """Return the work of a run: by the cost model of our servers, or by the probe of others."""
        work_of = self._config.work_of or (None if self.probe is None else _probed_work(self.probe))
        if work_of is None or not records:
            return None
        end = max(record.finish_time for record in records)
        devices = self._config.devices.get(name)
        num_devices = None if devices is None else devices.number
        return used_capacity(records, work_of, end, num_devices, limits_of)


def _probed_work(probe: PrefillProbe) -> WorkOf:
    def seconds(request: WorkloadRequest) -> float:
        return probe.fit(request.num_prompt_tokens)

    return seconds


@contextlib.contextmanager
def _started(name: str, server: Server, folder: Path) -> Iterator[tuple[str, str | None, ServerApi]]:
    """Yield the base URL of the server to measure, the model to ask it for (None: its first), and its API."""
    log = folder / server_log_name(name)
    match server:
        case ExternalServer():
            yield server.base_url, server.model, server.backend
        case PeerServer():
            print(f"Starting {name}: {shown_command(server.command)} ...", file=sys.stderr)
            with spawn_peer(name, server, log):
                yield server.base_url, None, server.backend
        case ServerConfig(num_instances=number, tensor_parallel_size=tp_size):
            size = f"--num-instances {number} --tensor-parallel-size {tp_size}"
            print(f"Starting a server with --policy {name} {size} ...", file=sys.stderr)
            with spawn_server(server, name, log) as base_url:
                yield base_url, None, ServerApi.OPENAI
        case _:
            assert_never(server)
