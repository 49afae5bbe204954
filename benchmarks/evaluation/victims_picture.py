"""The picture of docs/evaluation.md of short requests with long prompts, from results/victims.jsonl.

On the left is the TTFT of chats, alone and with prompts of 500,000 tokens; on the right the time of these
prompts. The last line of a file counts. No device is needed, and of packages numpy, msgspec and matplotlib.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from goodput_picture import IMAGES

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import FOLDER

from loong.workloads.plots.style import (
    INK,
    PALE_INK,
    PANEL_INCHES,
    house_style,
    log_scale,
    new_figure,
    styles_of,
    write_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW_INCHES = 0.4


@dataclass(frozen=True, slots=True)
class Victims:
    """P99 TTFT of chats in ms, alone and with long prompts, and the slowest of those.

    The slowest is relative to its time on an idle cluster; None if long prompts are refused.
    """

    policy: str
    alone: float
    mixed: float
    slowest: float | None


def read(file: Path, model: str) -> list[Victims]:
    """Return a model's rows of the last line."""
    rows = json.loads(file.read_text().splitlines()[-1])["rows"]
    return [
        Victims(policy, 1e3 * alone, 1e3 * mixed, slowest)
        for of_model, policy, alone, mixed, slowest in rows
        if of_model == model
    ]


def figure_of(rows: Sequence[Victims]) -> "Figure":
    """Draw chats on the left, long prompts on the right, a row a policy."""
    width, _ = PANEL_INCHES
    figure = new_figure((2 * width, ROW_INCHES * len(rows) + 1.0))
    left, right = figure.subplots(1, 2, sharey=True)
    styles = styles_of(row.policy for row in rows)
    for place, row in enumerate(rows):
        color = styles[row.policy].color
        left.plot((row.alone, row.mixed), (place, place), color=color)
        left.plot(row.alone, place, marker="o", color=color, fillstyle="none")
        left.plot(row.mixed, place, marker="o", color=color)
        reported = _times(row.mixed / row.alone)
        left.annotate(
            reported, (row.mixed, place), (7, 0), textcoords="offset points", va="center", color=INK
        )
        right.barh(place, row.slowest or 0.0, height=0.5, color=color)
        reported = "refused" if row.slowest is None else _times(row.slowest)
        right.annotate(
            reported, (row.slowest or 0.0, place), (4, 0), textcoords="offset points", va="center", color=INK
        )
    log_scale(left, "x", is_time=True)
    left.set(title="P99 TTFT of chats: alone (o), with long prompts", xlim=(None, 4 * left.get_xlim()[1]))
    right.set(title="slowest long prompt, of an idle cluster's time", xlim=(0, 1.12 * right.get_xlim()[1]))
    right.axvline(1.0, color=PALE_INK, linestyle=":")
    _name(left, rows)
    return figure


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 100 else f"{ratio:.3g}x"


def _name(panel: "Axes", rows: Sequence[Victims]) -> None:
    panel.set_yticks(range(len(rows)), [row.policy for row in rows])
    panel.set_ylim(len(rows) - 0.4, -0.6)  # the first on top
    panel.tick_params(axis="y", length=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--file", type=Path, default=FOLDER / "victims.jsonl", help="results of victims.py (%(default)s)"
    )
    parser.add_argument("--model", default="llama-3.1-8b", help="model to draw (%(default)s)")
    parser.add_argument(
        "--output",
        type=Path,
        default=IMAGES / "victims.svg",
        help="file to write, a .png or .svg (%(default)s)",
    )
    args = parser.parse_args()
    rows = read(args.file, args.model)
    if not rows:
        raise SystemExit(f"the last line of {args.file} has no rows of {args.model}")
    with house_style():
        write_figure(figure_of(rows), [args.output])
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
