"""How all pictures look: one table of colors, and figures that are written for print and for pages."""

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from loong.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 200
FONT_POINTS = 9
PANEL_INCHES = (4.8, 3.4)  # two beside each other on a page, one on a telephone
PICTURE_KINDS = ("png", "svg")
INK, PALE_INK, PAPER = "#1f2328", "#8a9199", "#ffffff"

# Okabe and Ito's colors, told apart by people with any common color blindness.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILION, GRAY, BROWN = "#56B4E9", "#D55E00", "#7F7F7F", "#8C6D31"


@dataclass(frozen=True, slots=True)
class LineStyle:
    """How one policy's line looks."""

    color: str
    dashes: str
    marker: str


# A policy has the same color, dashes and marker in every picture of every run.
POLICY_STYLES = {
    "esp": LineStyle(BLUE, "-", "o"),
    "esp-paper": LineStyle(VERMILION, "-", "s"),
    "static-sp": LineStyle(ORANGE, "-", "D"),
    "replicas": LineStyle(GREEN, "-", "^"),
    "chunked": LineStyle(PINK, "-", "v"),
    "chunked-replicas": LineStyle(BROWN, "-", "<"),
    "disaggregated": LineStyle(SKY, "-", ">"),
    "tp": LineStyle(GRAY, "-", "P"),
    "esp-fcfs": LineStyle(BLUE, "--", "v"),
    "esp-no-chunks": LineStyle(VERMILION, "--", "^"),
    "esp-no-scale-up": LineStyle(GREEN, "--", "s"),
    "esp-no-retention": LineStyle(ORANGE, "--", "o"),
    "esp-no-split": LineStyle(PINK, "--", "D"),
}
# What is not named above, such as other engines, takes these in the order of names.
OTHER_STYLES = tuple(
    LineStyle(color, ":", marker)
    for color, marker in zip(
        (GRAY, BROWN, SKY, PINK, GREEN, ORANGE, VERMILION), ("X", "*", "p", "h", "d", "8", "H"), strict=True
    )
)


def styles_of(names: Iterable[str]) -> dict[str, LineStyle]:
    """The style of each policy or server."""
    found = list(dict.fromkeys(names))
    others = sorted(name for name in found if name not in POLICY_STYLES)
    by_name = {name: OTHER_STYLES[i % len(OTHER_STYLES)] for i, name in enumerate(others)}
    return {name: POLICY_STYLES.get(name) or by_name[name] for name in found}


def is_available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Raise `ConfigError` if matplotlib is not installed."""
    if not is_available():
        raise ConfigError("pictures need matplotlib; pip install 'loong[bench]'")


@contextmanager
def house_style() -> Iterator[None]:
    """Figures made and written within look alike, and are the same bytes for the same data.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib import rc_context

    with rc_context(
        {
            "font.size": FONT_POINTS,
            "axes.titlesize": FONT_POINTS + 1,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.edgecolor": PALE_INK,
            "axes.labelcolor": INK,
            "axes.titlecolor": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.grid": True,
            "grid.color": PALE_INK,
            "grid.alpha": 0.35,
            "grid.linewidth": 0.5,
            "lines.linewidth": 1.8,
            "lines.markersize": 5,
            "text.color": INK,
            "xtick.color": PALE_INK,
            "xtick.labelcolor": INK,
            "ytick.color": PALE_INK,
            "ytick.labelcolor": INK,
            "legend.frameon": False,
            "legend.fontsize": FONT_POINTS - 1,
            "savefig.facecolor": PAPER,
            "svg.fonttype": "none",  # words stay words
            "svg.hashsalt": "loong",
        }
    ):
        yield


def new_figure(inches: tuple[float, float]) -> "Figure":
    """An empty figure that belongs to no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(figure: "Figure", paths: Sequence[Path]) -> None:
    """Write it to every path, by its suffix."""
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata)


def svg_of(figure: "Figure") -> str:
    """It as the text of an SVG file."""
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def say_nothing_to_show(panel: "Axes", why: str) -> None:
    """Write why a panel is empty into it."""
    panel.text(0.5, 0.5, why, ha="center", va="center", transform=panel.transAxes, color=PALE_INK)
