"""The picture of Pareto curves: throughput of a device against the speed for a user."""

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from loong.workloads.plots.style import (
    PALE_INK,
    PANEL_INCHES,
    PAPER,
    LineStyle,
    log_scale,
    name_policies,
    new_figure,
    say_nothing_to_show,
    styles_of,
)
from loong.workloads.report.pareto import ParetoCurves, ParetoPoint, curves_of
from loong.workloads.report.run_document import RuleRuns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RANGE_OPACITY, RANGE_WIDTH = 0.6, 1.0
DOMINATED_OPACITY = 0.55
WIDE = 8  # times the least value: from there on an axis is logarithmic
MARGIN = 0.08  # of an axis, for the words at its last point


def pareto_figure(runs: RuleRuns) -> "Figure":
    """Draw each policy's points, and a line through those that no other point of the policy dominates.

    Dominated points are hollow. A cross of thin lines reaches from the least to the greatest repetition.
    """
    curves = curves_of(runs)
    figure = new_figure(PANEL_INCHES)
    panel = figure.subplots()
    styles = styles_of(runs.policies)
    for policy in reversed(runs.policies):  # the first on top
        _draw_policy(panel, curves.of(policy), styles[policy])
    _scale(panel, curves)
    _name_rates(panel, curves)
    if not curves.points:
        say_nothing_to_show(panel, "no run has a time per output token")
    panel.set_title(f"Throughput per {curves.unit.value} against speed")
    panel.set_xlabel("speed: output tokens/s/user, 1 / median TPOT")
    panel.set_ylabel(f"output tokens/s/{curves.unit.value}")
    name_policies(figure, runs.policies)
    return figure


def _draw_policy(panel: "Axes", points: list[ParetoPoint], style: LineStyle) -> None:
    for point in points:
        (x, left, right), (y, low, high) = point.speed, point.throughput
        if left < right or low < high:
            panel.plot([left, right], [y, y], color=style.color, linewidth=RANGE_WIDTH, alpha=RANGE_OPACITY)
            panel.plot([x, x], [low, high], color=style.color, linewidth=RANGE_WIDTH, alpha=RANGE_OPACITY)
        if not point.is_best:
            panel.plot(
                [x],
                [y],
                color=style.color,
                linestyle="",
                marker=style.marker,
                markerfacecolor=PAPER,
                alpha=DOMINATED_OPACITY,
            )
    best = sorted((point.speed[0], point.throughput[0]) for point in points if point.is_best)
    panel.plot(
        [x for x, _ in best],
        [y for _, y in best],
        color=style.color,
        linestyle=style.dashes,
        marker=style.marker,
    )


def _scale(panel: "Axes", curves: ParetoCurves) -> None:
    panel.margins(MARGIN)
    if _is_wide([point.speed[0] for point in curves.points]):
        log_scale(panel, "x")
    else:
        panel.set_xlim(left=0)
    if _is_wide([point.throughput[0] for point in curves.points]):
        log_scale(panel, "y")
    else:
        panel.set_ylim(bottom=0)
        panel.yaxis.set_major_formatter("{x:,g}")


def _is_wide(values: Sequence[float]) -> bool:
    return bool(values) and max(values) > WIDE * min(values) > 0


def _name_rates(panel: "Axes", curves: ParetoCurves) -> None:
    """Write the requests per second at the points of the frontier of all policies."""
    for point in curves.points:
        if point.is_best_of_all:
            panel.annotate(
                "at once" if point.rate == inf else f"{point.rate:.3g}/s",
                (point.speed[0], point.throughput[0]),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=6.5,
                color=PALE_INK,
            )
