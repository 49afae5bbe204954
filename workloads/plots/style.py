"""The common style of all pictures: one table of colors, and figures for print and for pages."""

import importlib.util
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from loong.core.errors import ConfigError
from loong.core.printable import printable
from loong.private_files import private
from loong.workloads.palette import BLUE, BROWN, GRAY, GREEN, ORANGE, PINK, SKY, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 200
FONT_POINTS = 9
PANEL_INCHES = (4.8, 3.4)  # two side by side on a page, one on a telephone
LETTER_INCHES, LEGEND_MARK_INCHES = 0.063, 0.6  # of a legend's columns, about
LEGEND_ROW_INCHES = 0.17
MAX_LETTERS, MAX_NAME_LETTERS = 120, 40  # of a line, and of a name that takes room from what is drawn
PICTURE_KINDS = ("png", "svg")
NO_PICTURES = "No pictures: they need matplotlib; pip install matplotlib"
INK, PALE_INK, PAPER = "#1f2328", "#8a9199", "#ffffff"
ON_COLOR = "#fefefe"  # for words on bars, which stay as they are on a dark page


@dataclass(frozen=True, slots=True)
class LineStyle:
    """The style of one policy's line."""

    color: str
    dashes: Literal["-", "--", ":"]
    marker: str


# A policy has the same color, dashes and marker in every picture of every run.
POLICY_STYLES = {
    "esp": LineStyle(BLUE, "-", "o"),
    "esp-paper": LineStyle(VERMILION, "-", "s"),
    "static-sp": LineStyle(ORANGE, "-", "D"),
    "replicas": LineStyle(GREEN, "-", "^"),
    "chunked": LineStyle(PINK, "-", "v"),
    "chunked-replicas": LineStyle(BROWN, "-", "<"),
    "tp": LineStyle(GRAY, "-", "P"),
    "lightllm": LineStyle(PINK, "--", "p"),
    "infinite": LineStyle(SKY, ":", "s"),
    "infinite-paper": LineStyle(BROWN, ":", "D"),
    "distkv": LineStyle(ORANGE, ":", "^"),
    "lamina": LineStyle(VERMILION, ":", "d"),
    "lamina-by-request": LineStyle(BROWN, ":", "h"),
    "lamina-rotational": LineStyle(PINK, ":", "X"),
    "vllm-m": LineStyle(GREEN, "--", "<"),
    "vllm-s": LineStyle(GRAY, "--", ">"),
    "esp-fcfs": LineStyle(BLUE, "--", "v"),
    "esp-no-chunks": LineStyle(VERMILION, "--", "^"),
    "esp-no-apart": LineStyle(GREEN, "--", "s"),
    "esp-no-light-apart": LineStyle(SKY, "--", "v"),
    "esp-no-masters": LineStyle(VERMILION, "--", "v"),
    "esp-no-memory": LineStyle(VERMILION, "--", "d"),
    "esp-no-guests": LineStyle(GRAY, "--", "v"),
    "esp-no-spread": LineStyle(SKY, "--", "^"),
    "esp-no-moves": LineStyle(BROWN, "--", "D"),
    "esp-no-proactive": LineStyle(BROWN, "--", "v"),
    "esp-no-lone": LineStyle(ORANGE, "--", "o"),
    "esp-no-copies": LineStyle(PINK, "--", "D"),
}
FIXED_GROUPS = re.compile(r"esp-fixed-(\d+)")
DISAGGREGATED = re.compile(r"(esp-)?disaggregated-(\d+)")
NUMBER_MARKERS = "o^sDvP"  # of 1, 2, 4, 8, 16, 32 instances, and so on
# Names that are not above, such as other engines, take these in alphabetical order.
OTHER_STYLES = tuple(
    LineStyle(color, ":", marker)
    for color, marker in zip(
        (GRAY, BROWN, SKY, PINK, GREEN, ORANGE, VERMILION), ("X", "*", "p", "h", "d", "8", "H"), strict=True
    )
)


def styles_of(names: Iterable[str]) -> dict[str, LineStyle]:
    """Return the style of each policy or server; `esp (simulated)` is as `esp`, but dotted."""
    found = list(dict.fromkeys(names))
    known = {name: style for name in found if (style := _known_style(name))}
    others = sorted(name for name in found if name not in known)
    by_name = {name: OTHER_STYLES[i % len(OTHER_STYLES)] for i, name in enumerate(others)}
    return {name: known.get(name) or by_name[name] for name in found}


def _known_style(name: str) -> LineStyle | None:
    policy, _, variant = name.partition(" (")
    style = POLICY_STYLES.get(policy) or _numbered_style(policy)
    return replace(style, dashes=":") if style is not None and variant else style


def _numbered_style(policy: str) -> LineStyle | None:
    """Return the style of groups of N instances, or of N instances that decode."""
    if found := FIXED_GROUPS.fullmatch(policy):
        return LineStyle(BROWN, "--", _marker(found[1]))
    if found := DISAGGREGATED.fullmatch(policy):
        return LineStyle(SKY, "--" if found[1] else "-", _marker(found[2]))
    return None


def _marker(number: str) -> str:
    return NUMBER_MARKERS[(int(number).bit_length() - 1) % len(NUMBER_MARKERS)]


def is_available() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Raise `ConfigError` if matplotlib is not installed."""
    if not is_available():
        raise ConfigError(NO_PICTURES)


@contextmanager
def house_style() -> Iterator[None]:
    """Give figures made and written within a common style, and equal bytes for equal data.

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
            "text.parse_math": False,  # names may have any letters
            "text.usetex": False,
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
    """Return an empty figure that belongs to no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(figure: "Figure", paths: Sequence[Path]) -> None:
    """Write a figure to every path, in the format of its suffix. Names in it may come from anywhere."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_text(drawable(text.get_text()))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # SVG has the letter nevertheless
        _save(figure, paths)


def _save(figure: "Figure", paths: Sequence[Path]) -> None:
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else None
        with open(path, "wb", opener=private) as file:
            figure.savefig(file, format=path.suffix.removeprefix("."), metadata=metadata)
        figure.set_layout_engine(None)  # it is laid out now, and stays so


def drawable(text: str, max_letters: int = MAX_LETTERS) -> str:
    """Return a text without control characters, whose lines leave room for the picture."""
    lines = printable(text).replace("\t", " ").split("\n")
    return "\n".join(line if len(line) <= max_letters else f"{line[:max_letters]}..." for line in lines)


def say_nothing_to_show(panel: "Axes", why: str) -> None:
    """Write into a panel why it is empty."""
    panel.text(0.5, 0.5, why, ha="center", va="center", transform=panel.transAxes, color=PALE_INK)


def log_scale(panel: "Axes", which: Literal["x", "y"], *, is_time: bool = False) -> None:
    """Make an axis logarithmic with readable numbers; times are in ms, and written with their unit."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = panel.xaxis if which == "x" else panel.yaxis
    low, high = axis.get_data_interval()
    if not 0 < low <= high < inf:
        return  # nothing is drawn
    if which == "x":
        panel.set_xscale("log")
    else:
        panel.set_yscale("log")
    is_narrow = high < low * 30
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if is_narrow else (1.0,), numticks=7))
    write = _time if is_time else _plain
    axis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    axis.set_minor_formatter(NullFormatter())


def name_policies(figure: "Figure", policies: Sequence[str], *, has_markers: bool = True) -> None:
    """Write a legend of the policies below the picture."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=style.color, linestyle=style.dashes, marker=style.marker if has_markers else "")
        for style in styles_of(policies).values()
    ]
    names = [drawable(policy, MAX_NAME_LETTERS) for policy in policies]
    inches = LEGEND_MARK_INCHES + LETTER_INCHES * max(map(len, names), default=0)
    num_columns = min(len(policies), max(int(figure.get_figwidth() / inches), 1), 4)
    num_more_rows = -(-len(policies) // num_columns) - 1 if policies else 0
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW_INCHES * num_more_rows)
    figure.legend(handles, names, loc="outside lower center", ncols=num_columns)


def _plain(value: float) -> str:
    return f"{value:,.10g}"


def _time(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:,.10g} s" if milliseconds >= 1e3 else f"{milliseconds:.10g} ms"
