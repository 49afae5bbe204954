"""Tables of many runs: attainment by rate and by length of prompt, and goodput."""

from collections.abc import Sequence
from statistics import median

from loong.runs.goodput import A, Goodput
from loong.runs.run import PolicyRun
from loong.workloads.metrics.metrics import Metrics
from loong.workloads.plots.curves import at_rate
from loong.workloads.report.pareto import ParetoCurves, pareto_curves
from loong.workloads.report.report import spread_words, table

NOT_RUN = "-"


def attainment_by_rate(policies: Sequence[str], runs: Sequence[PolicyRun]) -> str:
    """Return a table of attainment by rate, in percent of all sent: the median and (range) of repeats."""
    rates = sorted({run.rate for run in runs})
    rows = [
        (
            f"{rate:.4g}",
            *(_attainment([r for r in runs if (r.rate, r.policy) == (rate, policy)]) for policy in policies),
        )
        for rate in rates
    ]
    return table(("req/s: SLO %", *policies), rows)


def line(run: PolicyRun) -> str:
    """Return a run in one line, to be printed as soon as the run is over."""
    metrics = run.metrics
    ttft, tpot = metrics.latencies.ttft, metrics.latencies.tpot
    latencies = ", ".join(
        f"{name} P90 {distribution['p90'] * 1e3:.0f} ms"
        for name, distribution in (("TTFT", ttft), ("TPOT", tpot))
        if distribution is not None
    )
    verdict = "attains" if run.attains else "misses"
    return (
        f"{run.policy} at {run.rate:.4g} req/s, seed {run.asked.seed}: {verdict}, {_attainment([run])} % of "
        f"{metrics.num_sent} within the SLO{_by_class(run)}; {latencies or 'none completed'}{_hits(metrics)}"
    )


def _hits(metrics: Metrics) -> str:
    """Return the obtained and the ideal hits of the prefix cache, if there could be any."""
    if not metrics.num_ideal_cached_tokens:
        return ""
    return f"; {_percent(metrics.hit_rate)} % of input cached, ideal {_percent(metrics.ideal_hit_rate)} %"


def _by_class(run: PolicyRun) -> str:
    """Return the attainment of each length class of a run judged by class, unless the run was cut off."""
    if not run.asked.is_per_class or run.is_cut_off:
        return ""
    shares = [f"{b.name}: {_percent(b.attainment)}" for b in run.metrics.buckets if b.num_sent]
    grows = {True: "is stable", False: "grows", None: "is of too few requests to judge"}[run.is_stable]
    used = None if run.used is None else run.used.share
    capacity = "" if used is None else f"; {_percent(used)} % of the capacity in use"
    return f" ({', '.join(shares)}; the backlog {grows}{capacity})"


def attainment_by_length(runs: Sequence[PolicyRun]) -> str:
    """Return a table of attainment in percent by policy, rate and range of prompt lengths.

    It shows the median of repeats, for ranges that were sent.
    """
    by_row: dict[tuple[str, float], list[PolicyRun]] = {}
    for run in runs:
        by_row.setdefault((run.policy, run.rate), []).append(run)
    names = [bucket.name for bucket in runs[0].metrics.buckets]
    sent = [i for i in range(len(names)) if any(r.metrics.buckets[i].num_sent for r in runs)]
    rows = [
        (
            f"{policy} at {rate:.4g} req/s",
            _attainment(same),
            *(_median([r.metrics.buckets[i].attainment for r in same]) for i in sent),
        )
        for (policy, rate), same in by_row.items()
    ]
    return table(("by unscaled prompt: SLO %", "all", *(names[i] for i in sent)), rows)


def curves_of_runs(runs: Sequence[PolicyRun]) -> ParetoCurves:
    """Return the Pareto curves of the runs that went to their ends."""
    return pareto_curves([run.speed for run in runs if not run.is_cut_off])


def pareto(curves: ParetoCurves) -> str:
    """Return a table of throughput and speed by policy and rate, which names the frontiers of each point."""
    columns = (
        "throughput and speed",
        "tokens/s/user",
        f"output tokens/s/{curves.unit.value}",
        "Pareto frontier",
    )
    return table(columns, pareto_rows(curves))


def pareto_rows(curves: ParetoCurves) -> list[tuple[str, ...]]:
    """Return speed, throughput and frontiers of each point; of repeats the median and (range)."""
    return [
        (
            f"{point.policy}, {at_rate(point.rate)}",
            spread_words(point.speed, _four_digits),
            spread_words(point.throughput, _four_digits),
            point.frontiers,
        )
        for point in curves.points
    ]


def goodput(goodputs: Sequence[Goodput[A]], goal: float, *, is_per_class: bool = False) -> str:
    """Return one row a policy: the highest rate that attains, also relative to the best."""
    name = f"all-class goodput ({goal * 100:.0f} % of each)" if is_per_class else f"P{goal * 100:.0f} goodput"
    best = max(goodputs, key=lambda g: g.rate)
    is_known = best.best is not None and all(g.too_high_rate is not None for g in goodputs)
    rows = [
        (
            g.policy,
            rate_found(g.rate, g.too_high_rate),
            f"{g.rate / best.rate:.2f}" if is_known else NOT_RUN,
            str(len(g.points)),
        )
        for g in goodputs
    ]
    return table((name, "req/s", "of best", "rates"), rows)


def rate_found(rate: float, too_high_rate: float | None) -> str:
    """Return a goodput, or the side of the tried rates that it is on; a rate of 0 means that none attains."""
    if too_high_rate is None:
        return f">= {rate:.4g}"
    return f"{rate:.4g}" if rate else f"< {too_high_rate:.4g}"


def _attainment(runs: Sequence[PolicyRun]) -> str:
    """Return the median and, of several, the range; a run that was cut off attained less than its goal."""
    if not runs:
        return NOT_RUN
    below = f"< {runs[0].asked.goal * 100:.0f}"
    values = sorted(0.0 if run.is_cut_off else run.metrics.attainment or 0.0 for run in runs)
    num_cut_off = sum(run.is_cut_off for run in runs)
    middle = below if 2 * num_cut_off >= len(runs) else _percent(median(values))
    if len(runs) == 1:
        return middle
    return f"{middle} ({below if num_cut_off else _percent(values[0])}-{_percent(values[-1])})"


def _four_digits(value: float | None) -> str:
    return NOT_RUN if value is None else f"{value:,.4g}"


def _median(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return _percent(median(known) if known else None)


def _percent(value: float | None) -> str:
    return NOT_RUN if value is None else f"{value * 100:.1f}"
