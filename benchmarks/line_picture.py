"""Pictures of lines, which scripts write beside their numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loong.workloads.plot_style import (
    PALE_INK,
    PANEL_INCHES,
    PICTURE_KINDS,
    house_style,
    is_available,
    new_figure,
    styles_of,
    write_figure,
)

Line = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: a line of (x, y) for each name, and where a level counts, that. Names of lines that are
    `POLICY, more words` have the policy's color, dashed.
    """

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Line]
    level: float | None = None
    is_log_x: bool = False
    is_log_y: bool = False


def write_lines(panels: Sequence[Panel], folder: Path, name: str, num_columns: int = 2) -> list[Path]:
    """Draw panels beside and below each other as NAME.png and .svg; return the paths.

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
        figure = new_figure((width * num_columns, height * num_rows))
        grid = figure.subplots(num_rows, num_columns, squeeze=False)
        for panel, axes in zip(panels, grid.flat, strict=False):
            for line, points in panel.lines.items():
                policy, _, more = line.partition(",")
                style = styles[policy]
                axes.plot(
                    *zip(*points, strict=True),
                    color=style.color,
                    linestyle="--" if more else style.dashes,
                    marker=style.marker,
                    fillstyle="none" if more else "full",
                    label=line,
                )
            if panel.level is not None:
                axes.axhline(panel.level, color=PALE_INK, linestyle=":")
            axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
            if panel.is_log_x:
                axes.set_xscale("log")
            if panel.is_log_y:
                axes.set_yscale("log")
            axes.legend()
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        write_figure(figure, paths)
    return paths
