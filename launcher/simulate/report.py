"""Simulates what was asked for, and tells it: tables, files, and one line of JSON at the end."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import msgspec

from loong.core.timeline import ClusterHistory
from loong.launcher import run_tables
from loong.launcher.goodput import Goodput
from loong.launcher.outputs import make_folder
from loong.launcher.plot.report import report_folder
from loong.launcher.run_document import document_head, goodput_json, write_document
from loong.launcher.runs import Asked
from loong.launcher.simulate import tables
from loong.launcher.simulate.config import SimulateConfig
from loong.launcher.simulate.documents import configuration_json, run_json, summary_json
from loong.launcher.simulate.points import PointResult, sweep
from loong.launcher.simulate.search import goodputs_of_sweep, search_all
from loong.server.trace import chrome_trace
from loong.workloads.plot_style import NO_PICTURES, is_available
from loong.workloads.result import JSON
from loong.workloads.slo import SLORule


def simulate_and_report(config: SimulateConfig, command: str) -> None:
    """Simulate, print tables, write the files that were asked for, and print one line of JSON.

    Raises:
        ConfigError: the output folder cannot be made, or not be written into.
    """
    if config.output_dir is not None:
        make_folder("--output-dir", config.output_dir)
    print(tables.heading(config), flush=True)
    start = perf_counter()
    results, goodputs = _simulated(config)
    wall_seconds = perf_counter() - start
    _print_tables(config, results, goodputs)
    num_events = sum(result.num_events for result in results)
    print(f"{num_events:,} events in {wall_seconds:.1f} s of {config.num_jobs} process(es)", file=sys.stderr)
    if config.output_dir is not None:
        document = {
            **document_head("simulate", command, configuration_json(config), config.rules, config.goal),
            "goodput": goodput_json(goodputs),
            "wall_seconds": wall_seconds,
        }
        _write_files(config.output_dir, config, results, document)
    print(msgspec.json.encode(summary_json(config, results, goodputs)).decode())


def _simulated(config: SimulateConfig) -> tuple[Sequence[PointResult], Sequence[Goodput[PointResult]]]:
    """All runs, and the goodputs that they show: none where each policy ran at one rate."""
    if config.precision:
        goodputs = search_all(config, config.precision)
        return [point for goodput in goodputs for point in goodput.points], goodputs
    results = sweep(config)
    return results, () if config.is_single else goodputs_of_sweep(config, results)


def _print_tables(
    config: SimulateConfig, results: Sequence[PointResult], goodputs: Sequence[Goodput[PointResult]]
) -> None:
    if len(results) > 1:
        print()  # below a line of each
    if refusals := tables.refusals(results):
        print(refusals, end="\n\n")
    for rule in config.rules:
        of_rule = [result for result in results if result.asked.rule == rule]
        if config.is_single:
            print(tables.runs(rule, of_rule), end="\n\n")
            continue
        of_policies = [goodput for goodput in goodputs if goodput.rule == rule]
        shown = [g.best for g in of_policies if g.best is not None] if config.precision else of_rule
        blocks = [f"SLO: {rule.describe()}", run_tables.attainment_by_rate(config.policies, of_rule)]
        if shown:
            blocks.append(run_tables.attainment_by_length(shown))
        blocks.append(run_tables.goodput(of_policies, config.goal))
        print("\n\n".join(blocks), end="\n\n")


def _write_files(
    folder: Path, config: SimulateConfig, results: Sequence[PointResult], document: dict[str, JSON]
) -> None:
    traces = _write_traces(folder, config, results) if config.is_single else {}
    runs = [
        {
            **run_json(result, traces[result.asked].name if result.asked in traces else None),
            "decision_log": None
            if result.decision_log is None
            else os.path.relpath(result.decision_log, folder),
        }
        for result in results
    ]
    logs = [result.decision_log for result in results if result.decision_log is not None]
    written = [write_document(folder, document, runs), *traces.values(), *dict.fromkeys(logs)]
    if not is_available():
        print(NO_PICTURES, file=sys.stderr)
    else:
        written += report_folder(folder)
    print(f"Wrote {', '.join(map(str, written))}", file=sys.stderr)


def _write_traces(folder: Path, config: SimulateConfig, results: Sequence[PointResult]) -> dict[Asked, Path]:
    """A trace of each run, which Perfetto opens; from the second rule on, numbered."""
    paths = {}
    for result in results:
        path = folder / f"trace-{result.policy}{_suffix(config, result.asked.rule)}.json"
        path.write_bytes(chrome_trace(result.history or ClusterHistory()))
        paths[result.asked] = path
    return paths


def _suffix(config: SimulateConfig, rule: SLORule) -> str:
    number = config.rules.index(rule) + 1
    return f"-{number}" if number > 1 else ""
