"""Line plots that scripts write along with their numbers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from loong.workloads.plots.style import (
    PALE_INK,
    PANEL_INCHES,
    PICTURE_KINDS,
    POLICY_STYLES,
    LineStyle,
    house_style,
    is_available,
    log_scale,
    new_figure,
    say_nothing_to_show,
    styles_of,
    write_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = Sequence[tuple[float, float]]

MAX_TICKS = 8  # values of x that are named one by one
WIDE = 8  # greatest over least x, from which the axis is logarithmic
LEGEND_INCHES = 1.6


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: a line of (x, y) for each name, and a level if there is one; a wide x is logarithmic.

    A name with a comma, such as `esp, simulated`, is of a line that belongs to `esp`: in its color, dashed.
    `key` is the title of the names, and `level_name` the name of the level. Shares are percents, with all of
    y from 0 to 100. Times on a logarithmic y axis are in ms, and shown with their unit.
    """

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Line]
    level: float | None = None
    is_share: bool = False
    has_log_times: bool = False
    key: str = ""
    level_name: str = ""


def lines_of(points: Iterable[tuple[str, float, float]]) -> dict[str, Line]:
    """Return the lines of named points, each name in the order in which it came first."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, x, y in points:
        lines.setdefault(name, []).append((x, y))
    return dict(lines)


def write_lines(panels: Sequence[Panel], folder: Path, name: str, num_columns: int = 2) -> list[Path]:
    """Draw panels side by side and below each other as NAME.png and .svg; return the paths.

    Without matplotlib there is no picture.
    """
    if not is_available():
        return []
    num_columns = min(num_columns, len(panels))
    num_rows = -(-len(panels) // num_columns)
    width, height = PANEL_INCHES
    styles = styles_of(line.partition(",")[0] for panel in panels for line in panel.lines)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in PICTURE_KINDS]
    with house_style():
        figure = new_figure(((width + LEGEND_INCHES) * num_columns, height * num_rows))
        grid = figure.subplots(num_rows, num_columns, squeeze=False)
        for panel, axes in zip(panels, grid.flat, strict=False):
            _draw(axes, panel, styles)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        write_figure(figure, paths)
    return paths


def _draw(axes: "Axes", panel: Panel, styles: Mapping[str, LineStyle]) -> None:
    for line, points in panel.lines.items():
        owner, _, more = line.partition(",")
        axes.plot(
            *zip(*points, strict=True),
            color=styles[owner].color,
            linestyle="--" if more else _dashes(owner),
            linewidth=1.0 if more else None,
            marker=styles[owner].marker,
            fillstyle="none" if more else "full",
        )
    if panel.level is not None:
        axes.axhline(panel.level, color=PALE_INK, linestyle=":")
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    ticks = sorted({x for points in panel.lines.values() for x, _ in points})
    if ticks and 0 < WIDE * ticks[0] <= ticks[-1]:
        log_scale(axes, "x")
    if panel.has_log_times:
        log_scale(axes, "y", is_time=True)
    if panel.is_share:
        axes.set_ylim(0, 103)
    if len(ticks) <= MAX_TICKS:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    if panel.lines:
        _name_lines(axes, panel, styles)
    else:
        say_nothing_to_show(axes, "no run came to its end")


def _dashes(owner: str) -> Literal["-", "--", ":"]:
    """Return the dashes of a policy, which differ for policies of one color; all others are solid."""
    return POLICY_STYLES[owner].dashes if owner in POLICY_STYLES else "-"


def _name_lines(axes: "Axes", panel: Panel, styles: Mapping[str, LineStyle]) -> None:
    """Write next to the plot the names of its lines, and once the meaning of dashes."""
    from matplotlib.lines import Line2D

    handles, dashed = {}, {}
    for line in panel.lines:
        owner, _, more = line.partition(",")
        color, marker = styles[owner].color, styles[owner].marker
        handles[owner] = Line2D([], [], color=color, marker=marker, linestyle=_dashes(owner))
        if more:
            dashed[more.strip()] = Line2D([], [], color=PALE_INK, linestyle="--", linewidth=1.0)
    handles |= dashed
    if panel.level_name:
        handles[panel.level_name] = Line2D([], [], color=PALE_INK, linestyle=":")
    axes.legend(
        handles.values(), handles, title=panel.key or None, loc="upper left", bbox_to_anchor=(1.0, 1.0)
    )
