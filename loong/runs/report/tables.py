"""The tables of a report: by rate, by policy, by length of prompt, and batches by DoP."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from loong.runs.report.answer import buckets_of, milliseconds, share, value_of, values_of
from loong.runs.run_tables import pareto_rows
from loong.workloads.plots.curves import at_rate
from loong.workloads.report.pareto import ParetoCurves, curves_of
from loong.workloads.report.report import ELASTIC_COUNTS
from loong.workloads.report.run_document import RuleRuns, RunDocument

HITS = {
    "prefix_hit_rate": "input from the prefix cache",
    "ideal_prefix_hit_rate": "the same of an unlimited cache",
}
SHARES = ("slo_attainment", "capacity_share", *HITS)
STATISTICS = {"mean": "mean", "median": "median", "p90": "P90", "p99": "P99"}
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "inter-token", "e2el": "end to end"}
BUCKET_COLUMNS = {
    "median_ttft_ms": "TTFT median",
    "p99_ttft_ms": "TTFT P99",
    "median_tpot_ms": "TPOT median",
    "p99_tpot_ms": "TPOT P99",
    "median_e2el_ms": "end to end, median",
}
COUNTS = {**ELASTIC_COUNTS, "num_preemptions": "Requests preempted"}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells; the first cell of each names it. A cell that is best of its row is marked."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: Sequence[int | None] = ()


def tables_of(runs: RuleRuns) -> Iterator[Table]:
    """Yield the tables of the runs under one rule."""
    if len(runs.rates) > 1:
        yield _rate_table(runs)
        if (curves := curves_of(runs)).points:
            yield _pareto_table(curves)
    yield _comparison(runs)
    yield _bucket_table(runs)
    yield _dop_table(runs)


def _rate_table(runs: RuleRuns) -> Table:
    rows = [
        (_rate(rate), *(_spread(runs, policy, rate, "slo_attainment", share) for policy in runs.policies))
        for rate in runs.rates
    ]
    return Table("SLO attainment by rate, of all requests sent", ("req/s", *runs.policies), rows)


def _pareto_table(curves: ParetoCurves) -> Table:
    columns = ("", "output tokens/s/user", f"output tokens/s/{curves.unit.value}", "Pareto frontier")
    return Table("Throughput against speed: 1 / median TPOT of each run", columns, pareto_rows(curves))


def _comparison(runs: RuleRuns) -> Table:
    rate = runs.shown_rate
    rows: list[tuple[str, ...]] = []
    best: list[int | None] = []

    def add(label: str, key: str, *, is_low_best: bool, unit: str = "") -> None:
        write = share if key in SHARES else milliseconds if key.endswith("_ms") else _plain
        cells = tuple(_spread(runs, policy, rate, key, write) for policy in runs.policies)
        rows.append((label + unit, *cells))
        values = [value_of(runs, policy, key) for policy in runs.policies]
        best.append(_best(values, is_low_best=is_low_best))

    add("SLO attainment", "slo_attainment", is_low_best=False)
    if any(value_of(runs, policy, "capacity_share") is not None for policy in runs.policies):
        add("capacity in use", "capacity_share", is_low_best=False)
    for key, words in HITS.items():
        if any(value_of(runs, policy, key) is not None for policy in runs.policies):
            add(words, key, is_low_best=False)
    add("requests that met the SLO", "request_goodput", is_low_best=False, unit=" (per s)")
    add("requests completed", "request_throughput", is_low_best=False, unit=" (per s)")
    add("output tokens", "output_throughput", is_low_best=False, unit=" (per s)")
    for name, words in LATENCIES.items():
        for statistic, called in STATISTICS.items():
            add(f"{words}, {called}", f"{statistic}_{name}_ms", is_low_best=True)
    return Table(f"All requests, {at_rate(rate)}", ("", *runs.policies), rows, best)


def _bucket_table(runs: RuleRuns) -> Table:
    """Return the table by length of prompt, with the policies side by side within each column.

    Requests of all repetitions are counted together.
    """
    policies = [policy for policy in runs.policies if runs.at(policy, runs.shown_rate)]
    rows = [
        (
            bucket,
            _plain(max((_sent(runs, policy, bucket) for policy in policies), default=0)),
            *(share(value_of(runs, policy, "slo_attainment", bucket)) for policy in policies),
            *(
                milliseconds(value_of(runs, policy, key, bucket))
                for key in BUCKET_COLUMNS
                for policy in policies
            ),
        )
        for bucket in buckets_of(runs)
    ]
    columns = [
        f"{words}: {policy}" for words in ("met the SLO", *BUCKET_COLUMNS.values()) for policy in policies
    ]
    caption = f"By length of prompt{runs.before_scaling}, {at_rate(runs.shown_rate)}"
    is_repeated = any(len(runs.at(policy, runs.shown_rate)) > 1 for policy in policies)
    sent = "sent in all repetitions" if is_repeated else "sent"
    return Table(caption, ("prompt tokens", sent, *columns), rows)


def _sent(runs: RuleRuns, policy: str, bucket: str) -> float:
    return sum(value or 0 for value in values_of(runs, policy, "sent", bucket))


def _dop_table(runs: RuleRuns) -> Table:
    """Return the table of batches at each degree of parallelism, scale-ups, scale-downs and moved KV."""
    batches: dict[str, dict[str, str]] = {}
    for policy in runs.policies:
        for run in runs.at(policy, runs.shown_rate)[:1]:
            for dop, count in (run.num_batches_by_dop or {}).items():
                if count:
                    batches.setdefault(dop, {})[policy] = f"{count:,}"
    rows = [
        (f"batches at DoP {dop}", *(batches[dop].get(policy, "0") for policy in runs.policies))
        for dop in sorted(batches, key=int)
    ]
    for key, words in COUNTS.items():
        values = [value_of(runs, policy, key) for policy in runs.policies]
        if any(value is not None for value in values):
            rows.append((words, *(_plain(value) for value in values)))
    return Table(f"What groups did, {at_rate(runs.shown_rate)}", ("", *runs.policies), rows)


def _best(values: Sequence[float | None], *, is_low_best: bool) -> int | None:
    """Return the index of the best of at least two values; None if another is as good."""
    there = [value for value in values if value is not None]
    if len(there) < 2 or len(set(there)) == 1:
        return None
    return values.index(min(there) if is_low_best else max(there))


def _spread(runs: RuleRuns, policy: str, rate: float, key: str, write: Callable[[float | None], str]) -> str:
    spread = runs.spread(policy, rate, key)
    if spread is None:
        return "n/a"
    middle, least, most = spread
    return write(middle) if least == most else f"{write(middle)} ({write(least)} to {write(most)})"


def _plain(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"


def _rate(rate: float) -> str:
    return "at once" if rate == inf else f"{rate:.4g}"


def all_numbers(document: RunDocument) -> Iterator[Table]:
    """Yield every number of every run, except those of single requests."""
    for run in document.runs:
        rows = [(name, _exact(value)) for name, value in run.numbers.items() if name not in ("policy", "slo")]
        for dop, count in (run.num_batches_by_dop or {}).items():
            rows.append((f"batches at DoP {dop}", f"{count}"))
        for bucket in run.by_prompt_length:
            rows += [
                (f"{bucket['bucket']}: {name}", _exact(v)) for name, v in bucket.items() if name != "bucket"
            ]
        caption = f"{run.policy}, {run.slo}, {at_rate(run.request_rate)}, repetition {run.repeat}"
        yield Table(caption, ("key", "value"), rows)


def _exact(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
