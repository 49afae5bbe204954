"""Pictures of a sweep: attainment and latencies against the rate, and attainment against the SLO's scale.

A line is the median of repetitions, and the band around it reaches from the least to the greatest of them.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, TypeAlias

from loong.workloads.plots.style import (
    INK,
    PANEL_INCHES,
    LineStyle,
    log_scale,
    name_policies,
    new_figure,
    say_nothing_to_show,
    styles_of,
)
from loong.workloads.report.run_document import RuleRuns, RunRow, Spread, spread_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCALES = tuple(2 ** (exponent / 16) for exponent in range(-64, 65))  # from 1/16 to 16
LATENCIES = {
    "median_ttft_ms": "median TTFT",
    "p99_ttft_ms": "P99 TTFT",
    "median_tpot_ms": "median TPOT",
    "p99_tpot_ms": "P99 TPOT",
}
BAND_OPACITY = 0.2
MAX_NAMED_RATES = 8  # that are ticks themselves

Curve: TypeAlias = Sequence[tuple[float, Spread]]


def attainment_by_rate_figure(runs: RuleRuns) -> "Figure":
    """Draw the share of all sent requests that met the SLO, by rate, with a line at the goal."""
    figure = new_figure(PANEL_INCHES)
    panel = figure.subplots()
    _draw_curves(panel, runs, partial(_by_rate, runs, "slo_attainment", 100.0))
    _draw_goal(panel, runs.goal)
    name_policies(figure, runs.policies)
    panel.set_title("SLO attainment against rate")
    _label_rates(panel, runs.rates)
    return figure


def latency_by_rate_figure(runs: RuleRuns) -> "Figure":
    """Draw median and P99 of TTFT and TPOT by rate."""
    width, height = PANEL_INCHES
    figure = new_figure((2 * width, 2 * height))
    panels = figure.subplots(2, 2, sharex=True).flat
    for panel, (key, label) in zip(panels, LATENCIES.items(), strict=True):
        _draw_curves(panel, runs, partial(_by_rate, runs, key, 1.0))
        panel.set_title(f"{label} against rate")
        panel.set_ylabel(f"{label}, logarithmic (ms, s)")
        log_scale(panel, "y", is_time=True)
        _label_rates(panel, runs.rates)
    name_policies(figure, runs.policies)
    return figure


def attainment_by_scale_figure(runs: RuleRuns) -> "Figure":
    """Draw the attainment that stricter or looser bounds would have given, at one rate."""
    rate = runs.shown_rate
    figure = new_figure(PANEL_INCHES)
    panel = figure.subplots()
    _draw_curves(panel, runs, lambda policy: _by_scale(runs.at(policy, rate)), has_markers=False)
    _draw_goal(panel, runs.goal)
    panel.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
    panel.text(1.04, 40.0, "the SLO as it is", fontsize=7, rotation=90, ha="left", va="center")
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:g}")
    name_policies(figure, runs.policies, has_markers=False)
    panel.set_title(f"SLO attainment against SLO scale, {at_rate(rate)}")
    panel.set_xlabel("scale of every bound: stricter to the left")
    return figure


def at_rate(rate: float) -> str:
    """Return a rate in words."""
    return "all sent at once" if rate == inf else f"at {rate:.4g} req/s"


def _by_rate(runs: RuleRuns, key: str, factor: float, policy: str) -> Curve:
    spreads = ((rate, runs.spread(policy, rate, key)) for rate in runs.rates)
    return [
        (rate, (middle * factor, least * factor, most * factor))
        for rate, spread in spreads
        if spread is not None
        for middle, least, most in (spread,)
    ]


def _by_scale(repeats: Sequence[RunRow]) -> Curve:
    ratios = [sorted(ratio for ratio in run.slo_ratios if ratio is not None) for run in repeats]
    curve = []
    for scale in SCALES:
        shares = [
            100.0 * bisect_right(of_run, scale) / run.num_prompts
            for of_run, run in zip(ratios, repeats, strict=True)
        ]
        spread = spread_of(shares)
        if spread is not None:
            curve.append((scale, spread))
    return curve


def _draw_curves(
    panel: "Axes", runs: RuleRuns, curve_of: Callable[[str], Curve], *, has_markers: bool = True
) -> None:
    styles = styles_of(runs.policies)
    has_any = False
    for policy in reversed(runs.policies):  # the first on top
        curve = [(x, spread) for x, spread in curve_of(policy) if x < inf]
        has_any = has_any or bool(curve)
        _draw_curve(panel, policy, curve, styles[policy], has_markers=has_markers)
    if not has_any:
        say_nothing_to_show(panel, "no run went to its end")


def _draw_curve(panel: "Axes", name: str, curve: Curve, style: LineStyle, *, has_markers: bool) -> None:
    xs = [x for x, _ in curve]
    if any(least < most for _, (_, least, most) in curve):
        lows, highs = ([spread[end] for _, spread in curve] for end in (1, 2))
        panel.fill_between(xs, lows, highs, color=style.color, alpha=BAND_OPACITY, linewidth=0)
    panel.plot(
        xs,
        [spread[0] for _, spread in curve],
        color=style.color,
        linestyle=style.dashes,
        marker=style.marker if has_markers else "",
        label=name,
    )


def _draw_goal(panel: "Axes", goal: float) -> None:
    panel.axhline(goal * 100, color=INK, linewidth=0.9, linestyle="--")
    panel.annotate(
        f"goal: {goal * 100:g} %",
        (1.0, goal * 100),
        xycoords=("axes fraction", "data"),
        xytext=(-2, -3),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=7,
        color=INK,
    )
    panel.set_ylabel("SLO attainment (% of all sent)")
    panel.set_ylim(0, 103)


def _label_rates(panel: "Axes", rates: Sequence[float]) -> None:
    finite = [rate for rate in rates if rate < inf]
    if len(finite) > 1 and finite[-1] > 8 * finite[0]:
        log_scale(panel, "x")
    if len(finite) <= MAX_NAMED_RATES:
        panel.set_xticks(finite, [f"{rate:g}" for rate in finite])
        panel.minorticks_off()
    panel.set_xlabel("requests per second")
