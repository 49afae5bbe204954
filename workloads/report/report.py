"""Text reports: one block a run, tables by prompt length and by policy, and the work of groups."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from loong.workloads.metrics.counters import ServerCounters
from loong.workloads.metrics.metrics import Distribution, Metrics
from loong.workloads.report.run_document import Spread, spread_of

BLOCK_WIDTH = 50
HISTOGRAM_WIDTH = 40
UNKNOWN = "n/a"
Row: TypeAlias = tuple[str, ...]
HEADINGS = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
    "normalized": ("End-to-end Latency per Token", "normalized"),
    "normalized_input": ("Input Latency per Prompt Token", "input"),
    "normalized_output": ("Output Latency per Output Token", "output"),
}
ELASTIC_COUNTS = {
    "num_scale_ups": "Scale-ups (groups grew)",
    "num_scale_downs": "Scale-downs (shrank, with KV kept)",
    "num_hand_overs": "Hand-overs (others took over)",
    "num_retained_tokens": "KV tokens retained",
    "num_pushed_tokens": "KV tokens pushed",
    "num_migrated_tokens": "KV tokens migrated",
    "num_memory_tokens": "KV tokens migrated to memory instances",
    "num_copied_tokens": "KV tokens copied",
    "num_switched_tokens": "KV tokens read from another copy",
    "num_window_dropped_tokens": "KV tokens dropped in layers with a window",
    "num_served_tokens": "KV tokens read elsewhere",
    "num_relayed_tokens": "KV tokens read once for several",
    "num_leases": "Decode leases",
    "num_group_leases": "Leases of several instances",
    "num_multi_master_leases": "Leases of several masters",
    "num_served_leases": "Leases that read KV elsewhere",
    "num_micro_batched_leases": "Leases in micro-batches",
    "num_program_calls": "Calls of the batching program",
    "num_program_calls_of_several": "Calls with several prompts",
}
"""The words for counts of `ServerCounters`, in the order in which they are shown."""
SHOWN_STATISTICS = {"mean": "Mean", "median": "Median", "p90": "P90", "p95": "P95", "p99": "P99"}


def format_run(title: str, metrics: Metrics, slo: str | None, *, kind: str = "Policy") -> str:
    """Return the block of one run, laid out as vLLM's: name on the left, number on the right.

    The title names the run; `kind` is its kind.
    """
    lines = [
        f"{' Serving Benchmark Result ':=^{BLOCK_WIDTH}}",
        _row(f"{kind}:", title),
        _row("Successful requests:", str(metrics.num_completed)),
        _row("Failed requests:", str(metrics.num_failed)),
        _row("Benchmark duration (s):", _number(metrics.duration)),
        _row("Total input tokens:", str(metrics.num_input_tokens)),
        _row("Requested input tokens:", str(metrics.num_requested_input_tokens)),
        _row("Total generated tokens:", str(metrics.num_output_tokens)),
        _row("Requested output tokens:", str(metrics.num_requested_output_tokens)),
        _row("Request throughput (req/s):", _number(metrics.request_throughput)),
        _row("Output token throughput (tok/s):", _number(metrics.output_throughput)),
        _row("Total token throughput (tok/s):", _number(metrics.total_token_throughput)),
    ]
    lines += [
        _row("Prefix cache hits (% of input):", _percent(metrics.hit_rate)),
        _row("Ideal prefix cache hits (%):", _percent(metrics.ideal_hit_rate)),
    ]
    if slo is not None:
        lines.append(_row("Request goodput (req/s):", _number(metrics.request_goodput)))
        lines.append(_row("SLO attainment (% of all sent):", _percent(metrics.attainment)))
    for name, distribution in metrics.latencies.by_name().items():
        heading, short = HEADINGS[name]
        lines.append(f"{heading:-^{BLOCK_WIDTH}}")
        lines += [
            _row(f"{label} {short} (ms):", _ms(distribution, statistic))
            for statistic, label in SHOWN_STATISTICS.items()
        ]
    lines.append("=" * BLOCK_WIDTH)
    return "\n".join(lines + _notes(metrics, slo))


def format_buckets(metrics: Metrics) -> str:
    """Return a table with one row for each range of prompt lengths, before scaling, that was sent."""
    rows = [
        (
            bucket.name,
            str(bucket.num_sent),
            _percent(bucket.attainment),
            _ms(bucket.latencies.ttft, "median"),
            _ms(bucket.latencies.ttft, "p99"),
            _ms(bucket.latencies.tpot, "median"),
            _ms(bucket.latencies.tpot, "p99"),
            _ms(bucket.latencies.e2el, "median"),
        )
        for bucket in metrics.buckets
        if bucket.num_sent
    ]
    header = (
        "unscaled prompt",
        "sent",
        "SLO %",
        "TTFT p50 ms",
        "TTFT p99 ms",
        "TPOT p50 ms",
        "TPOT p99 ms",
        "E2EL p50 ms",
    )
    return table(header, rows)


def format_comparison(runs: Mapping[str, Sequence[Metrics]]) -> str:
    """Return a table with one row a metric and one column a policy.

    Of repeated runs it has the median (range), and the requests of all together.
    """

    def row(name: str, value: Callable[[Metrics], float | None], show: Callable[[float | None], str]) -> Row:
        spreads = (spread_of([value(metrics) for metrics in repeats]) for repeats in runs.values())
        return (name, *(spread_words(spread, show) for spread in spreads))

    def latency(name: str, statistic: str) -> Row:
        def value(metrics: Metrics) -> float | None:
            distribution = metrics.latencies.by_name()[name]
            return None if distribution is None else distribution[statistic] * 1e3

        return row(f"{name.upper()} {statistic} (ms)", value, _number)

    completed = (
        "/".join(str(sum(counts)) for counts in ([m.num_completed for m in r], [m.num_sent for m in r]))
        for r in runs.values()
    )
    of_all = " in all repetitions" if any(len(repeats) > 1 for repeats in runs.values()) else ""
    rows: list[Row] = [
        (f"completed / sent{of_all}", *completed),
        row("duration (s)", lambda m: m.duration, _number),
        row("request throughput (req/s)", lambda m: m.request_throughput, _number),
        row("output throughput (tok/s)", lambda m: m.output_throughput, _number),
        row("request goodput (req/s)", lambda m: m.request_goodput, _number),
        row("SLO attainment (%)", lambda m: m.attainment, _percent),
        row("prefix cache hits (% of input)", lambda m: m.hit_rate, _percent),
        row("ideal prefix cache hits (%)", lambda m: m.ideal_hit_rate, _percent),
    ]
    for name in ("ttft", "tpot", "itl", "e2el"):
        rows += [latency(name, statistic) for statistic in ("mean", "median", "p90", "p99")]
    return table(("", *runs), rows)


def format_counters(counters: ServerCounters) -> str:
    """Return the histogram of DoP and the counts of elastic moves, without those that the server lacks."""
    lines = []
    if counters.num_batches_by_dop is not None:
        lines += _histogram(counters.num_batches_by_dop)
    counts = ((words, getattr(counters, name)) for name, words in ELASTIC_COUNTS.items())
    lines += [_row(f"{words}:", f"{count:,}") for words, count in counts if count is not None]
    if counters.busy_seconds and (at_once := counters.two_prompt_groups_seconds) is not None:
        lines.append(
            _row("Two prompt groups at once (% of time):", _percent(at_once / counters.busy_seconds))
        )
    return "\n".join(lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells in columns, the first to the left and the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in (header, ["-" * width for width in widths], *rows)
    )


def _histogram(by_dop: Mapping[int, int]) -> list[str]:
    shown = {dop: count for dop, count in by_dop.items() if count}
    most = max(shown.values(), default=1)
    bars = [
        f"  DoP {dop:<3} {count:>8} {'#' * max(1, round(count / most * HISTOGRAM_WIDTH))}"
        for dop, count in shown.items()
    ]
    return ["Batches by degree of parallelism:", *(bars or ["  none"])]


def _notes(metrics: Metrics, slo: str | None) -> list[str]:
    notes = []
    if slo is not None:
        notes.append(f"SLO: {slo}")
    if metrics.lateness is not None:
        notes.append(f"Load generator behind by p99: {metrics.lateness['p99'] * 1e3:.2f} ms")
    if metrics.num_without_usage:
        notes.append(
            f"{metrics.num_without_usage} requests came without usage: their output tokens are the pieces of "
            "their streams"
        )
    return notes


def _row(name: str, value: str) -> str:
    return f"{name:<{BLOCK_WIDTH - 10}}{value:<10}".rstrip()


def spread_words(spread: Spread | None, show: Callable[[float | None], str]) -> str:
    """Return the median and, if repetitions differ, their range."""
    if spread is None:
        return show(None)
    middle, least, most = spread
    return show(middle) if least == most else f"{show(middle)} ({show(least)}-{show(most)})"


def _ms(distribution: Distribution | None, statistic: str) -> str:
    if distribution is None:
        return UNKNOWN
    return _number(distribution[statistic] * 1e3)


def _number(value: float | None) -> str:
    """Return two decimals as in vLLM's report, or two significant digits for a small number."""
    if value is None:
        return UNKNOWN
    return f"{value:.2g}" if 0 < value < 0.1 else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value * 100:.1f}"
