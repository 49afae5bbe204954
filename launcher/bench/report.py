"""The output of a benchmark: blocks and tables while it runs, and a line of JSON for programs at the end."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from loong.launcher.bench.config import BenchConfig
from loong.launcher.bench.files import write_files
from loong.launcher.bench.found import BenchFindings, MeasuredRun, by_policy, missing_runs
from loong.runs import run_tables
from loong.runs.background_load import background_load_note
from loong.runs.report.report_words import print_end
from loong.runs.run_document import goodput_json
from loong.runs.spawned_server import ServerConfig
from loong.workloads.metrics.result import JSON, metrics_json
from loong.workloads.report.report import format_buckets, format_comparison, format_counters, format_run
from loong.workloads.workload import origin_of

LATE_SECONDS = 0.01  # of the load generator, from which a report warns
SUMMARY_KEYS = (
    "completed",
    "failed",
    "duration",
    "request_throughput",
    "output_throughput",
    "request_goodput",
    "slo_attainment",
    "prefix_hit_rate",
    "ideal_prefix_hit_rate",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_tpot_ms",
)


def print_workload(config: BenchConfig) -> None:
    """Print the load, the origin of its lengths, and the values that were chosen."""
    load = config.load
    pace = "all at once"
    if load.rates[0] < math.inf:
        spread = "replayed" if load.burstiness is None else f"burstiness {load.burstiness:g}"
        pace = f"at {', '.join(f'{rate:g}' for rate in load.rates)} req/s ({spread})"
    if load.max_concurrency is not None:
        pace += f", at most {load.max_concurrency} in flight"
    number = f"{load.duration:g} s of" if load.num_requests is None else str(load.num_requests)
    print(
        f"Workload: {load.workload} ({origin_of(load.workload)}, scale {load.length_scale:g}), "
        f"{number} requests {pace}, seed {load.seed}\n" + "".join(f"{line}\n" for line in config.chosen),
        flush=True,
    )


def print_run(run: MeasuredRun, config: BenchConfig) -> None:
    """Print a server's block and tables, or of many runs a line of each."""
    lateness = run.metrics.lateness
    if lateness is not None and lateness["p99"] > LATE_SECONDS:
        print(
            f"The load generator was late by {lateness['p99'] * 1e3:.0f} ms (P99); give it a core",
            file=sys.stderr,
        )
    if not config.is_single:
        print(run_tables.line(run), flush=True)
        return
    kind = "Policy" if isinstance(config.servers[run.policy], ServerConfig) else "Server"
    block = format_run(run.policy, run.metrics, config.slo.describe(), kind=kind)
    blocks = [block, format_buckets(run.metrics)]
    counters = format_counters(run.counters)
    errors = [error for error in run.errors if error]
    if run.num_unfinished:
        blocks.append(f"Interrupted: {run.num_unfinished:,} more requests had not ended; they are left out")
    if counters:
        blocks.append(counters)
    if errors:
        blocks.append(f"First of {len(errors)} errors: {errors[0]}")
    print("\n\n".join(blocks), end="\n\n")


def report(found: BenchFindings, config: BenchConfig, folder: Path, command: str) -> None:
    """Compare at least one run, write the files, and print the comparison, their paths, and JSON."""
    _print_tables(found, config)
    write_files(folder, found, config, command)
    shares = {name: [run.share_of_others for run in runs] for name, runs in by_policy(found.runs).items()}
    if (background_load := background_load_note(shares)) is not None:
        print(background_load, file=sys.stderr)
    if missing := missing_runs(found, config):
        print(f"Not measured to the end: {', '.join(missing)}", file=sys.stderr)
    print_end(folder, _summary(found, config), is_json_printed=config.is_json_printed)


def _print_tables(found: BenchFindings, config: BenchConfig) -> None:
    blocks = []
    if found.probe is not None:
        lengths = ", ".join(str(length) for length in found.probe.num_prompt_tokens)
        first = found.runs[0].policy
        blocks.append(
            f"Unloaded prefill of n tokens: {found.probe.fit.describe()} ({first}, probed at {lengths})"
        )
    runs_of = by_policy(found.runs)
    if not config.is_single:
        blocks += [
            f"SLO: {config.slo.describe()}",
            run_tables.attainment_by_rate(tuple(runs_of), found.runs),
        ]
        best = [run for goodput in found.goodputs if goodput.best is not None for run in goodput.best.runs]
        if shown := best if config.precision is not None else found.runs:
            blocks.append(run_tables.attainment_by_length(shown))
        if found.goodputs:
            blocks.append(run_tables.goodput(found.goodputs, config.goal, is_per_class=config.is_per_class))
        if (curves := run_tables.curves_of_runs(found.runs)).points:
            blocks.append(run_tables.pareto(curves))
    elif len(found.runs) > 1:
        comparison = {name: [run.metrics for run in runs] for name, runs in runs_of.items()}
        blocks.append(format_comparison(comparison))
    print("\n" * (not config.is_single) + "\n\n".join(blocks), end="\n\n")


def _summary(found: BenchFindings, config: BenchConfig) -> dict[str, JSON]:
    """Return a summary: the goodputs, or of each server the medians of its repeated runs."""
    load = config.load
    head: dict[str, JSON] = {
        "workload": load.workload,
        "num_requests": load.num_requests,
        "seed": load.seed,
        "slo": config.slo.name,
    }
    if not config.is_single:
        return {**head, "goodput": goodput_json(found.goodputs, is_per_class=config.is_per_class)}
    return {
        **head,
        "num_repeats": config.num_repeats,
        "runs": {name: _medians(runs) for name, runs in by_policy(found.runs).items()},
    }


def _medians(runs: Sequence[MeasuredRun]) -> JSON:
    documents = [metrics_json(run.metrics) for run in runs]
    values = {key: [document[key] for document in documents] for key in SUMMARY_KEYS}
    return {
        key: median(found) if (found := [v for v in column if isinstance(v, int | float)]) else None
        for key, column in values.items()
    }
