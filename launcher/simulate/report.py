"""Simulates what was asked for, and tells it: tables, files, and one line of JSON at the end."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from time import perf_counter

import msgspec

from loong.core.errors import ConfigError
from loong.launcher.machine import machine_facts
from loong.launcher.simulate import tables
from loong.launcher.simulate.config import SimulateConfig
from loong.launcher.simulate.points import ATTAINMENT, PointResult, sweep
from loong.launcher.simulate.search import Goodput, goodputs_of_sweep, search_all
from loong.server.trace import chrome_trace
from loong.workloads.plot import is_available, plot_timelines
from loong.workloads.plot_attainment import plot_attainment
from loong.workloads.result import JSON, metrics_json
from loong.workloads.slo import SLORule
from loong.workloads.timeline import parse_timeline

PICTURE_KINDS = ("png", "svg")


def simulate_and_report(config: SimulateConfig, command: str) -> None:
    """Simulate, print tables, write the files that were asked for, and print one line of JSON.

    Raises:
        ConfigError: the output folder cannot be made.
    """
    if config.output_dir is not None:
        _make_folder(config.output_dir)
    print(tables.heading(config))
    start = perf_counter()
    results, goodputs = _simulated(config)
    wall_seconds = perf_counter() - start
    _print_tables(config, results, goodputs)
    num_events = sum(result.num_events for result in results)
    print(f"{num_events:,} events in {wall_seconds:.1f} s of {config.num_jobs} process(es)", file=sys.stderr)
    if config.output_dir is not None:
        document = {**_results(config, results, goodputs, command), "wall_seconds": wall_seconds}
        _write_files(config.output_dir, config, results, document)
    print(msgspec.json.encode(_summary(config, results, goodputs)).decode())


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


def _results(
    config: SimulateConfig, results: Sequence[PointResult], goodputs: Sequence[Goodput], command: str
) -> dict[str, JSON]:
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": dict(machine_facts()),
        "configuration": _configuration(config),
        "goodput": _goodput_json(goodputs),
        "runs": [_run_json(result) for result in results],
    }


def _configuration(config: SimulateConfig) -> dict[str, JSON]:
    """What was asked for; infinities are words, as JSON has no number for them."""
    load = config.load
    return {
        "model": config.model,
        "hardware": msgspec.to_builtins(config.hardware),
        "workload": load.workload,
        "seed": load.seed,
        "num_requests": load.num_requests,
        "duration": load.duration,
        "burstiness": _number(load.burstiness),
        "length_scale": load.length_scale,
        "rates": list(config.rates),
        "precision": config.precision,
        "slos": [rule.describe() for rule in config.rules],
        "policies": list(config.policies),
        "policy": msgspec.to_builtins(config.policy),
        "num_cores": _number(config.host.num_cores),
        "plan_time": config.host.plan_time,
    }


def _run_json(result: PointResult) -> dict[str, JSON]:
    stats = result.stats
    return {
        "policy": result.point.policy,
        "slo": result.point.rule.describe(),
        "request_rate": result.point.rate,
        "is_cut_off": result.is_cut_off,
        "num_events": result.num_events,
        **metrics_json(result.metrics),
        "num_batches_by_dop": {str(dop): count for dop, count in sorted(stats.num_batches_by_dop.items())},
        "num_scale_ups": stats.num_scale_ups,
        "num_scale_downs": stats.num_scale_downs,
        "num_retained_tokens": stats.num_retained_tokens,
        "num_migrated_tokens": stats.num_migrated_tokens,
        "num_preemptions": stats.num_preemptions,
    }


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


def _summary(
    config: SimulateConfig, results: Sequence[PointResult], goodputs: Sequence[Goodput]
) -> dict[str, JSON]:
    """What came of it, in short: attainment where each policy ran at one rate, else goodput."""
    found = {"goodput": _goodput_json(goodputs)} if goodputs else {"attainment": _attainment_json(results)}
    return {"workload": config.load.workload, "seed": config.load.seed, **found}


def _attainment_json(results: Sequence[PointResult]) -> JSON:
    return [
        {
            "policy": result.point.policy,
            "slo": result.point.rule.describe(),
            "request_rate": result.point.rate,
            "slo_attainment": result.metrics.attainment,
        }
        for result in results
    ]


def _goodput_json(goodputs: Sequence[Goodput]) -> JSON:
    return [
        {
            "policy": g.policy,
            "slo": g.rule.describe(),
            "request_rate": g.rate,
            "too_high_rate": g.too_high_rate,
            "runs": len(g.points),
        }
        for g in goodputs
    ]


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output-dir {folder} cannot be made: {error}") from error


def _number(value: float | None) -> JSON:
    return "inf" if value == inf else value
