"""Tables of many runs: attainment by rate and by length of prompt, and goodput."""

from collections.abc import Sequence
from statistics import median

from loong.launcher.goodput import A, Goodput
from loong.launcher.runs import Run
from loong.workloads.report import table

NOT_RUN = "-"


def attainment_by_rate(policies: Sequence[str], runs: Sequence[Run]) -> str:
    """One row a rate and one column a policy, in percent of all sent; the median, and (range) of repeats."""
    rates = sorted({run.rate for run in runs})
    rows = [
        (
            f"{rate:.4g}",
            *(_attainment([r for r in runs if (r.rate, r.policy) == (rate, policy)]) for policy in policies),
        )
        for rate in rates
    ]
    return table(("req/s: SLO %", *policies), rows)


def attainment_by_length(runs: Sequence[Run]) -> str:
    """One row a run and one column a range of prompt lengths that was sent, in percent."""
    names = [bucket.name for bucket in runs[0].metrics.buckets]
    is_sent = [any(r.metrics.buckets[i].num_sent for r in runs) for i in range(len(names))]
    rows = [
        (
            f"{r.policy} at {r.rate:.4g} req/s",
            _attainment([r]),
            *(_percent(b.attainment) for b, sent in zip(r.metrics.buckets, is_sent, strict=True) if sent),
        )
        for r in runs
    ]
    columns = (name for name, sent in zip(names, is_sent, strict=True) if sent)
    return table(("by unscaled prompt: SLO %", "all", *columns), rows)


def goodput(goodputs: Sequence[Goodput[A]], goal: float) -> str:
    """One row a policy: the highest rate that attains, also relative to the best, if the best was found."""
    best = max(goodputs, key=lambda g: g.rate)
    is_known = best.best is not None and all(g.too_high_rate is not None for g in goodputs)
    rows = [
        (g.policy, _rate(g), f"{g.rate / best.rate:.2f}" if is_known else NOT_RUN, str(len(g.points)))
        for g in goodputs
    ]
    return table((f"P{goal * 100:.0f} goodput", "req/s", "of best", "rates"), rows)


def _rate(goodput: Goodput[A]) -> str:
    if goodput.too_high_rate is None:
        return f">= {goodput.rate:.4g}"
    return f"< {goodput.too_high_rate:.4g}" if goodput.best is None else f"{goodput.rate:.4g}"


def _attainment(runs: Sequence[Run]) -> str:
    """What was attained; a run that was cut off attained less than its goal."""
    if not runs:
        return NOT_RUN
    if any(run.is_cut_off for run in runs):
        return f"< {runs[0].asked.goal * 100:.0f}"
    values = [run.metrics.attainment for run in runs if run.metrics.attainment is not None]
    if len(values) < 2:
        return _percent(values[0] if values else None)
    return f"{_percent(median(values))} ({_percent(min(values))}-{_percent(max(values))})"


def _percent(value: float | None) -> str:
    return NOT_RUN if value is None else f"{value * 100:.1f}"
