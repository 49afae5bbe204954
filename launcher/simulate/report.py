"""Simulates what was asked for, and tells it: tables, files, and one line of JSON at the end."""

import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import msgspec

from loong.launcher.outputs import make_folder
from loong.launcher.simulate import tables
from loong.launcher.simulate.config import SimulateConfig
from loong.launcher.simulate.documents import results_json, summary_json
from loong.launcher.simulate.points import ATTAINMENT, PointResult, sweep
from loong.launcher.simulate.search import Goodput, goodputs_of_sweep, search_all
from loong.server.trace import chrome_trace
from loong.workloads.plot import is_available, plot_timelines
from loong.workloads.plot_attainment import plot_attainment
from loong.workloads.result import JSON
from loong.workloads.slo import SLORule
from loong.workloads.timeline import parse_timeline

PICTURE_KINDS = ("png", "svg")


def simulate_and_report(config: SimulateConfig, command: str) -> None:
    """Simulate, print tables, write the files that were asked for, and print one line of JSON.

    Raises:
        ConfigError: the output folder cannot be made, or not be written into.
    """
    if config.output_dir is not None:
        make_folder("--output-dir", config.output_dir)
    print(tables.heading(config))
    start = perf_counter()
    results, goodputs = _simulated(config)
    wall_seconds = perf_counter() - start
    _print_tables(config, results, goodputs)
    num_events = sum(result.num_events for result in results)
    print(f"{num_events:,} events in {wall_seconds:.1f} s of {config.num_jobs} process(es)", file=sys.stderr)
    if config.output_dir is not None:
        document = {**results_json(config, results, goodputs, command), "wall_seconds": wall_seconds}
        _write_files(config.output_dir, config, results, document)
    print(msgspec.json.encode(summary_json(config, results, goodputs)).decode())


def _simulated(config: SimulateConfig) -> tuple[Sequence[PointResult], Sequence[Goodput]]:
    """All runs, and the goodputs that they show: none where each policy ran at one rate."""
    if config.precision:
        goodputs = search_all(config, config.precision)
        return [point for goodput in goodputs for point in goodput.points], goodputs
    results = sweep(config)
    return results, () if config.is_single else goodputs_of_sweep(config, results)


def _print_tables(
    config: SimulateConfig, results: Sequence[PointResult], goodputs: Sequence[Goodput]
) -> None:
    if refusals := tables.refusals(results):
        print(refusals, end="\n\n")
    for rule in config.rules:
        of_rule = [result for result in results if result.point.rule == rule]
        if config.is_single:
            print(tables.runs(rule, of_rule), end="\n\n")
            continue
        of_policies = [goodput for goodput in goodputs if goodput.rule == rule]
        shown = [g.best for g in of_policies if g.best is not None] if config.precision else of_rule
        blocks = [f"SLO: {rule.describe()}", tables.attainment_by_rate(config.policies, of_rule)]
        if shown:
            blocks.append(tables.attainment_by_length(shown))
        blocks.append(tables.goodput(of_policies))
        print("\n\n".join(blocks), end="\n\n")


def _write_files(
    folder: Path, config: SimulateConfig, results: Sequence[PointResult], document: dict[str, JSON]
) -> None:
    written = [folder / "results.json"]
    written[0].write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    if not is_available():
        print("No picture: matplotlib is not installed; pip install 'loong[bench]'.", file=sys.stderr)
    elif config.is_single:
        written += _write_timelines(folder, config, results)
    else:
        curves = {
            rule.describe(): {policy: _curve(results, policy, rule) for policy in config.policies}
            for rule in config.rules
        }
        pictures = [folder / f"attainment.{kind}" for kind in PICTURE_KINDS]
        plot_attainment(curves, ATTAINMENT, pictures)
        written += pictures
    print(f"Wrote {', '.join(map(str, written))}", file=sys.stderr)


def _write_timelines(folder: Path, config: SimulateConfig, results: Sequence[PointResult]) -> list[Path]:
    """A picture a rule, and for each run a trace that Perfetto opens; from the second rule on, numbered.

    Returns their paths.
    """
    written = []
    for number, rule in enumerate(config.rules, 1):
        suffix = f"-{number}" if number > 1 else ""
        timelines = {}
        for result in results:
            if result.point.rule == rule:
                trace = msgspec.json.encode(chrome_trace(result.slices))
                written.append(folder / f"trace-{result.point.policy}{suffix}.json")
                written[-1].write_bytes(trace)
                timelines[result.point.policy] = parse_timeline(trace)
        pictures = [folder / f"timeline{suffix}.{kind}" for kind in PICTURE_KINDS]
        plot_timelines(timelines, pictures)
        written += pictures
    return written


def _curve(results: Sequence[PointResult], policy: str, rule: SLORule) -> list[tuple[float, float]]:
    """Attainment by rate, of the runs that went to their end."""
    return [
        (result.point.rate, result.metrics.attainment or 0.0)
        for result in results
        if (result.point.policy, result.point.rule) == (policy, rule) and not result.is_cut_off
    ]
