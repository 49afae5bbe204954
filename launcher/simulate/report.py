"""Runs the configured simulations and reports them: tables, files, and one line of JSON at the end."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

from loong.core.cluster_history import ClusterHistory
from loong.launcher.simulate import tables
from loong.launcher.simulate.documents import configuration_json, run_json, summary_json
from loong.private_files import write_private
from loong.runs import run_tables
from loong.runs.goodput import Goodput
from loong.runs.report.report import report_folder
from loong.runs.report.report_words import print_end
from loong.runs.run import RunKey
from loong.runs.run_document import document_head, goodput_json, pareto_json, write_document
from loong.runs.run_folder import run_folder
from loong.server.metrics.trace import chrome_trace
from loong.simulation.config import SimulateConfig
from loong.simulation.points import PointResult, all_asked, sweep
from loong.simulation.search import all_searches, goodputs_of_sweep, search_all
from loong.workloads.metrics.result import JSON
from loong.workloads.metrics.slo import SLORule
from loong.workloads.plots.style import NO_PICTURES, is_available


@dataclass(slots=True)
class _Found:
    """The results of a simulation so far; each property keeps the order of the configuration."""

    config: SimulateConfig
    made: list[PointResult] = field(default_factory=list)  # runs of a sweep
    searched: list[Goodput[PointResult]] = field(default_factory=list)

    def take(self, result: PointResult) -> None:
        """Keep a run of a sweep and, if there are several, print its line."""
        self.made.append(result)
        if len(all_asked(self.config)) > 1:
            print(run_tables.line(result), flush=True)

    @property
    def results(self) -> list[PointResult]:
        """Return all runs."""
        if self.config.precision:
            return [point for goodput in self.goodputs for point in goodput.points]
        place = {asked: index for index, asked in enumerate(all_asked(self.config))}
        return sorted(self.made, key=lambda result: place[result.asked])

    @property
    def goodputs(self) -> Sequence[Goodput[PointResult]]:
        """Return the goodputs that the runs show; none where each policy ran at one rate."""
        if not self.config.precision:
            return () if self.config.is_single else goodputs_of_sweep(self.config, self.results)
        place = {task: index for index, task in enumerate(all_searches(self.config))}
        return sorted(self.searched, key=lambda goodput: place[goodput.policy, goodput.rule])

    @property
    def missing(self) -> list[str]:
        """Return the runs, or the searches, that were not completed."""
        if self.config.precision:
            searched = {(goodput.policy, goodput.rule) for goodput in self.searched}
            tasks = all_searches(self.config)
            return [f"the goodput of {p} under {r.describe()}" for p, r in tasks if (p, r) not in searched]
        made = {result.asked for result in self.made}
        return [
            f"{asked.policy} at {asked.rate:.4g} req/s under {asked.rule.name}"
            for asked in all_asked(self.config)
            if asked not in made
        ]


def simulate_and_report(config: SimulateConfig, command: str) -> None:
    """Simulate, print tables, write the configured files, and print one line of JSON.

    If the simulation is interrupted, the runs that have ended are reported, and the others are named.

    Raises:
        ConfigError: the output folder cannot be made, or not be written into.
    """
    with run_folder("simulate", config.output_dir) as folder:
        config = replace(config, output_dir=folder)
        print(tables.heading(config), flush=True)
        start = perf_counter()
        found = _Found(config)
        try:
            _simulate(config, found)
        finally:
            if found.made or found.searched:
                _report(folder, config, command, found, perf_counter() - start)


def _simulate(config: SimulateConfig, found: _Found) -> None:
    """Make all runs; the goodputs of a sweep are known from the runs that have ended."""
    if config.precision:
        search_all(config, config.precision, found.searched.append)
    else:
        sweep(config, found.take)


def _report(folder: Path, config: SimulateConfig, command: str, found: _Found, wall_seconds: float) -> None:
    results, goodputs, missing = found.results, found.goodputs, found.missing
    _print_tables(config, results, goodputs)
    num_events = sum(result.num_events for result in results)
    print(f"{num_events:,} events in {wall_seconds:.1f} s of {config.num_jobs} process(es)", file=sys.stderr)
    document: dict[str, JSON] = {
        **document_head("simulate", command, configuration_json(config), config.rules, config.goal),
        "goodput": goodput_json(goodputs, is_per_class=config.is_per_class),
        "pareto": _pareto_json(config, results),
        "wall_seconds": wall_seconds,
        "missing_runs": [*missing],
    }
    _write_files(folder, config, results, document)
    if missing:
        print(f"Not simulated: {'; '.join(missing)}", file=sys.stderr)
    print_end(folder, summary_json(config, results, goodputs), is_json_printed=config.is_json_printed)


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
        blocks.append(run_tables.goodput(of_policies, config.goal, is_per_class=config.is_per_class))
        if (curves := run_tables.curves_of_runs(of_rule)).points:
            blocks.append(run_tables.pareto(curves))
        print("\n\n".join(blocks), end="\n\n")


def _pareto_json(config: SimulateConfig, results: Sequence[PointResult]) -> list[JSON]:
    return [
        point
        for rule in config.rules
        for point in pareto_json(
            run_tables.curves_of_runs([result for result in results if result.asked.rule == rule]), rule
        )
    ]


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


def _write_traces(folder: Path, config: SimulateConfig, results: Sequence[PointResult]) -> dict[RunKey, Path]:
    """Write a trace of each run, which Perfetto opens; from the second rule on, numbered."""
    paths = {}
    for result in results:
        path = folder / f"trace-{result.policy}{_suffix(config, result.asked.rule)}.json"
        write_private(path, chrome_trace(result.history or ClusterHistory()))
        paths[result.asked] = path
    return paths


def _suffix(config: SimulateConfig, rule: SLORule) -> str:
    number = config.rules.index(rule) + 1
    return f"-{number}" if number > 1 else ""
