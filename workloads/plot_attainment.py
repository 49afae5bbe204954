"""The picture of a sweep: SLO attainment against rate, one line a policy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from loong.workloads.plot_style import DOTS_PER_INCH, require_matplotlib

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve: TypeAlias = Sequence[tuple[float, float]]
"""Requests per second, ascending, and the fraction of them that met the SLO."""

# A policy has the same color and line in every picture; those that are not named here come after them.
POLICIES = (
    "esp",
    "tp",
    "replicas",
    "static-sp",
    "chunked",
    "disaggregated",
    "esp-paper",
    "chunked-replicas",
    "esp-fcfs",
    "esp-no-scale-up",
    "esp-no-retention",
    "esp-no-chunks",
    "esp-no-split",
)
LINES = ("-", "--", ":")
PANEL_INCHES = (7.0, 4.0)
MARKERS = "osD^v<>"


def plot_attainment(curves: Mapping[str, Mapping[str, Curve]], goal: float, paths: Sequence[Path]) -> None:
    """Draw one panel an SLO (`curves[slo][policy]`) with a line at `goal`, and write it to every path.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = PANEL_INCHES
    figure = Figure(figsize=(width, height * len(curves)), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (slo, by_policy) in zip(panels, curves.items(), strict=True):
        _draw_panel(panel, slo, by_policy, goal)
    panels[-1].set_xlabel("requests per second")
    for path in paths:
        figure.savefig(path)


def _draw_panel(panel: "Axes", slo: str, by_policy: Mapping[str, Curve], goal: float) -> None:
    panel.axhline(goal * 100, color="black", linewidth=0.8, linestyle=":")
    names = (*POLICIES, *sorted(by_policy.keys() - set(POLICIES)))
    for policy, curve in by_policy.items():
        index = names.index(policy)
        panel.plot(
            [rate for rate, _ in curve],
            [attainment * 100 for _, attainment in curve],
            color=COLORS[index % len(COLORS)],
            linestyle=LINES[index // len(COLORS) % len(LINES)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=3,
            label=policy,
        )
    panel.set_title(slo, loc="left", fontsize=9)
    panel.set_ylabel("SLO attainment (%)")
    panel.set_ylim(0, 103)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter("{x:.2g}")
    panel.grid(visible=True, which="both", linewidth=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=8)
