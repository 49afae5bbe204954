"""The picture of goodput: a bar a policy, to the highest rate at which enough requests meet the SLO."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loong.workloads.plots.style import INK, MAX_NAME_LETTERS, PANEL_INCHES, drawable, new_figure, styles_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAR_INCHES = 0.22
NUM_COLUMNS = 2


@dataclass(frozen=True, slots=True)
class GoodputBar:
    """A policy's goodput in requests a second; at least that if no rate was too high for it."""

    policy: str
    rate: float
    is_at_least: bool = False

    @property
    def label(self) -> str:
        """Return the rate in words."""
        if self.rate == 0:
            return "none found"
        return f"{'≥ ' if self.is_at_least else ''}{self.rate:.3g}"


def goodput_figure(panels: Sequence[tuple[str, Sequence[GoodputBar]]], meaning: str) -> "Figure":
    """Draw a panel for each title, each with a scale of its own; `meaning` says what the bars are."""
    width, _ = PANEL_INCHES
    num_columns = min(NUM_COLUMNS, len(panels))
    num_rows = -(-len(panels) // num_columns)
    most = max(len(bars) for _, bars in panels)
    figure = new_figure((width * num_columns, num_rows * (BAR_INCHES * most + 0.55) + 0.4))
    places = figure.subplots(num_rows, num_columns, squeeze=False).flat
    for panel, (title, bars) in zip(places, panels, strict=False):
        _draw_bars(panel, bars)
        panel.set_title(title)
    for panel in list(figure.axes)[len(panels) :]:
        panel.set_axis_off()
    figure.supxlabel(
        meaning,
        fontsize="medium",
        color=INK,
    )
    return figure


def _draw_bars(panel: "Axes", bars: Sequence[GoodputBar]) -> None:
    styles = styles_of(bar.policy for bar in bars)
    rates = [bar.rate for bar in bars]
    drawn = panel.barh(range(len(bars)), rates, height=0.75, color=[styles[bar.policy].color for bar in bars])
    panel.bar_label(drawn, [bar.label for bar in bars], padding=3, fontsize=8, color=INK)
    panel.set_yticks(range(len(bars)), [drawable(bar.policy, MAX_NAME_LETTERS) for bar in bars])
    panel.set_ylim(len(bars) - 0.4, -0.6)  # the first on top
    panel.set_xlim(0, (max(rates, default=0.0) or 1.0) * 1.15)
    panel.tick_params(axis="y", length=0)
    panel.grid(visible=False, axis="y")
