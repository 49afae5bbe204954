"""The picture of a run: instances over time, what each works on, in which group, and the KV that it holds.

A group is as tall as it has instances, so its DoP is its height; color tells what it works on. Time is cut
into columns, and each shows what took most of it, so that a run of any length is a picture of bounded size.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from loong.core.placement import InstanceId
from loong.core.timeline import BatchSlice, ClusterHistory
from loong.workloads.plot_style import (
    BLUE,
    GREEN,
    INK,
    ON_COLOR,
    PALE_INK,
    VERMILION,
    house_style,
    new_figure,
    say_nothing_to_show,
    write_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE_INCHES = 10.0
AXES_INCHES = 9.2  # about, of the time axis
ROW_INCHES = 0.5
NUM_COLUMNS = 1200
MAX_LABEL_GAP = 8  # columns; steps closer than this share a label
LABEL_POINTS = 7
LABEL_INCHES = 0.0095 * LABEL_POINTS  # of one letter
# A row is 1 high: the bar, and under it the strip of KV.
BAR_TOP, BAR_BOTTOM = 0.0, 0.62
STRIP_TOP, STRIP_BOTTOM = 0.68, 0.94
STRIP_LEVELS = 24
PREFILL_SHARE = 0.7  # of a bar, where a batch also decodes
LONG_SHARE = 0.25  # of the longest prompt, from which prompts are long
TINT = 0.4  # opacity of a group's color between its rows


class Work(Enum):
    """What a batch does, as far as colors go."""

    LONG = VERMILION
    SHORT = BLUE
    DECODE = GREEN


@dataclass(frozen=True, slots=True)
class Cell:
    """What an instance does in a column; `decodes` too, in a batch that also prefills."""

    members: frozenset[InstanceId]
    work: Work
    decodes: bool
    longest_prompt: int


@dataclass(frozen=True, slots=True)
class Scale:
    """What all panels share: the seconds that are shown, from which length a prompt is long, and the most KV.

    `peak_kv` is a share of an instance's pool.
    """

    start: float
    end: float
    long_prompt: int
    peak_kv: float

    @staticmethod
    def of(histories: Collection[ClusterHistory], window: tuple[float, float] | None) -> "Scale":
        """Of all of them; `window` None shows everything."""
        start, end = window or (0.0, max((history.end for history in histories), default=0.0) or 1.0)
        batches = [batch for history in histories for batch in history.batches]
        scale = Scale(start, end, long_prompt_of(batches), 0.0)
        held = [
            max(most_by_column(kv_shares(history, i), scale))
            for history in histories
            for i in history.instance_ids
        ]
        return replace(scale, peak_kv=max(held, default=0.0))

    @property
    def column(self) -> float:
        """Seconds."""
        return (self.end - self.start) / NUM_COLUMNS

    def time(self, column: int) -> float:
        """When a column begins."""
        return self.start + column * self.column


Row: TypeAlias = Mapping[int, Cell]
"""What one instance does, by column; nothing where it is idle."""

Box: TypeAlias = tuple[float, float, float, float]
"""Left and right in seconds, top and bottom in rows."""


def plot_timelines(
    histories: Mapping[str, ClusterHistory],
    paths: Sequence[Path],
    window: tuple[float, float] | None = None,
) -> None:
    """Draw a panel for each title on one time axis, and write the picture to every path, by its suffix.

    `window` is the seconds to show, all if it is None.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    with house_style():
        write_figure(timelines_figure(histories, window), paths)


def timelines_figure(
    histories: Mapping[str, ClusterHistory], window: tuple[float, float] | None = None
) -> "Figure":
    """The figure of `plot_timelines`, to be made and written in house style."""
    num_rows = [max(len(history.instance_ids), 1) for history in histories.values()]
    height = sum(ROW_INCHES * rows + 0.45 for rows in num_rows) + 1.0
    figure = new_figure((PICTURE_INCHES, height))
    panels = figure.subplots(len(histories), 1, sharex=True, squeeze=False, height_ratios=num_rows)[:, 0]
    scale = Scale.of(histories.values(), window)
    for panel, (title, history) in zip(panels, histories.items(), strict=True):
        _draw_panel(panel, history, scale)
        panel.set_title(title)
    panels[-1].set_xlabel("time since the first batch (s)")
    _draw_legend(figure, scale)
    return figure


def long_prompt_of(batches: Iterable[BatchSlice]) -> int:
    """From which length prompts are long; 0 if nothing was prefilled."""
    return ceil(LONG_SHARE * max((batch.longest_prompt for batch in batches), default=0))


def kv_shares(history: ClusterHistory, instance_id: InstanceId) -> list[tuple[float, float]]:
    """From when on an instance has which share of its pool in use; nothing where its size is not known."""
    capacity = history.kv_capacity.get(instance_id)
    if not capacity:
        return []
    return sorted(
        (time, tokens / capacity)
        for batch in history.batches
        for time, counts in ((batch.started_at, batch.kv_reserved), (batch.ended_at, batch.kv_used))
        for held_by, tokens in counts
        if held_by == instance_id
    )


def rows_of(history: ClusterHistory, scale: Scale) -> Mapping[InstanceId, Row]:
    """What took most of each column, of every instance."""
    seconds: dict[tuple[InstanceId, int], dict[Cell, float]] = defaultdict(lambda: defaultdict(float))
    for batch in history.batches:
        start, end = max(batch.started_at, scale.start), min(batch.ended_at, scale.end)
        if start >= end:
            continue
        cell = _cell(batch, scale.long_prompt)
        first, last = (min(int((t - scale.start) / scale.column), NUM_COLUMNS - 1) for t in (start, end))
        for column in range(first, last + 1):
            share = min(end, scale.time(column + 1)) - max(start, scale.time(column))
            for instance_id in cell.members:
                seconds[instance_id, column][cell] += max(share, 0.0)
    cells: dict[InstanceId, dict[int, Cell]] = {instance_id: {} for instance_id in history.instance_ids}
    for (instance_id, column), shares in seconds.items():
        cells[instance_id][column] = max(shares, key=lambda cell: shares[cell])
    return cells


def _cell(batch: BatchSlice, long_prompt: int) -> Cell:
    members = frozenset(batch.group.instance_ids)
    if batch.phase == "decode":
        return Cell(members, Work.DECODE, decodes=False, longest_prompt=0)
    work = Work.LONG if 0 < long_prompt <= batch.longest_prompt else Work.SHORT
    return Cell(members, work, batch.phase == "mixed", batch.longest_prompt)


def _draw_panel(panel: "Axes", history: ClusterHistory, scale: Scale) -> None:
    rows = rows_of(history, scale)
    height = {instance_id: float(row) for row, instance_id in enumerate(rows)}
    boxes: dict[tuple[str, float], list[Box]] = defaultdict(list)  # by color and opacity
    for instance_id, row in rows.items():
        for color, opacity, box in _bars(instance_id, row, height, scale):
            boxes[color, opacity].append(box)
        boxes[INK, 1.0] += kv_strip(height[instance_id], kv_shares(history, instance_id), scale)
        panel.axhline(height[instance_id] + STRIP_BOTTOM, color=PALE_INK, linewidth=0.4, zorder=1)
    for (color, opacity), of_color in boxes.items():
        _draw_boxes(panel, of_color, color, opacity)
    _draw_labels(panel, rows, height, scale)
    _draw_axes(panel, list(rows), scale)
    if not rows:
        say_nothing_to_show(panel, "no batch ran")


def _bars(
    instance_id: InstanceId, row: Row, height: Mapping[InstanceId, float], scale: Scale
) -> Iterator[tuple[str, float, Box]]:
    """The bars of an instance; those of a group go on, paler, to the next of its rows."""
    top = height[instance_id]
    for cell, columns in _stretches(row):
        left, right = scale.time(columns.start), scale.time(columns.stop)
        middle = top + BAR_TOP + (BAR_BOTTOM - BAR_TOP) * (PREFILL_SHARE if cell.decodes else 1.0)
        yield cell.work.value, 1.0, (left, right, top + BAR_TOP, middle)
        if cell.decodes:
            yield Work.DECODE.value, 1.0, (left, right, middle, top + BAR_BOTTOM)
        if instance_id + 1 in cell.members and instance_id + 1 in height:
            yield cell.work.value, TINT, (left, right, top + BAR_BOTTOM, top + 1 + BAR_TOP)


def _draw_boxes(panel: "Axes", boxes: Sequence[Box], color: str, opacity: float) -> None:
    """All of one color as one path, which keeps files small."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    corners = [
        corner
        for left, right, top, bottom in boxes
        for corner in ((left, top), (right, top), (right, bottom), (left, bottom), (left, top))
    ]
    if corners:
        codes = [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY] * len(boxes)
        outline = Outline(corners, codes)
        panel.add_patch(PathPatch(outline, facecolor=color, alpha=opacity, linewidth=0, zorder=2))


def _stretches(row: Row) -> Iterator[tuple[Cell, range]]:
    """Columns that follow each other and show the same."""
    start = last = None
    for column in sorted(row):
        if start is not None and last is not None and (column > last + 1 or row[column] != row[start]):
            yield row[start], range(start, last + 1)
            start = None
        start, last = column if start is None else start, column
    if start is not None and last is not None:
        yield row[start], range(start, last + 1)


def kv_strip(top: float, samples: Sequence[tuple[float, float]], scale: Scale) -> Iterator[Box]:
    """The KV of an instance; columns that look alike are one box."""
    if not samples or not scale.peak_kv:
        return
    floor, height = top + STRIP_BOTTOM, STRIP_BOTTOM - STRIP_TOP
    levels = [
        ceil(share / scale.peak_kv * STRIP_LEVELS) for share in most_by_column(samples, scale)
    ]  # what is held at all is seen
    column = 0
    for level, alike in groupby(levels):
        start, column = column, column + len(list(alike))
        if level:
            yield scale.time(start), scale.time(column), floor - height * level / STRIP_LEVELS, floor


def most_by_column(samples: Sequence[tuple[float, float]], scale: Scale) -> list[float]:
    """The most in each column."""
    most = [0.0] * NUM_COLUMNS
    column, level = 0, 0.0
    shown = [sample for sample in samples if sample[0] < scale.end]
    for time, share in (*shown, (scale.end, 0.0)):
        if time >= scale.start:
            now = min(int((time - scale.start) / scale.column), NUM_COLUMNS - 1)
            for between in range(column, now + 1):
                most[between] = max(most[between], level)
            column = now
        level = share
    return most


def _draw_labels(
    panel: "Axes", rows: Mapping[InstanceId, Row], height: Mapping[InstanceId, float], scale: Scale
) -> None:
    """Name the DoP and the work of each group where it is wide enough for words, on its first row."""
    for instance_id, row in rows.items():
        own = {column: cell for column, cell in row.items() if min(cell.members) == instance_id}
        for cells, columns in _group_stretches(own):
            inches = len(columns) / NUM_COLUMNS * AXES_INCHES
            label = next((text for text in _labels(cells) if len(text) * LABEL_INCHES < inches), None)
            if label is not None:
                middle = scale.time(columns.start) + len(columns) / 2 * scale.column
                panel.text(
                    middle,
                    height[instance_id] + BAR_TOP + (BAR_BOTTOM - BAR_TOP) * PREFILL_SHARE / 2,
                    label,
                    ha="center",
                    va="center_baseline",
                    fontsize=LABEL_POINTS,
                    fontweight="bold",
                    color=ON_COLOR,
                    zorder=4,
                )


def _group_stretches(row: Row) -> Iterator[tuple[list[Cell], range]]:
    """Cells of one group doing one kind of work that follow each other closely."""
    cells: list[Cell] = []
    start = last = 0
    for column in sorted(row):
        cell = row[column]
        if cells:
            is_same = (cells[-1].members, cells[-1].work) == (cell.members, cell.work)
            if not is_same or column - last > MAX_LABEL_GAP:
                yield cells, range(start, last + 1)
                cells = []
        if not cells:
            start = column
        cells.append(cell)
        last = column
    if cells:
        yield cells, range(start, last + 1)


def _labels(cells: Sequence[Cell]) -> Iterator[str]:
    """What to write, the longest first."""
    dop = f"DoP {len(cells[0].members)}"
    if cells[0].work is Work.DECODE:
        yield f"{dop}: decode"
    else:
        also = " + decode" if all(cell.decodes for cell in cells) else ""
        prompts = {cell.longest_prompt for cell in cells}
        if len(prompts) == 1:
            yield f"{dop}: prompt of {max(prompts):,} tokens{also}"
        yield f"{dop}: prefill{also}"
    yield dop


def _draw_axes(panel: "Axes", instance_ids: Sequence[InstanceId], scale: Scale) -> None:
    panel.set_ylabel("instance")
    panel.set_yticks(
        [row + (BAR_TOP + BAR_BOTTOM) / 2 for row in range(len(instance_ids))], map(str, instance_ids)
    )
    panel.tick_params(axis="y", length=0)
    panel.set_ylim(max(len(instance_ids), 1), 0.0)  # the first instance on top
    panel.set_xlim(scale.start, scale.end)
    panel.grid(visible=False)


def _draw_legend(figure: "Figure", scale: Scale) -> None:
    from matplotlib.patches import Patch

    words = {
        Work.LONG: f"prefill of long prompts ({scale.long_prompt:,} tokens or more)",
        Work.SHORT: "prefill of shorter prompts" if scale.long_prompt else "prefill",
        Work.DECODE: "decode",
    }
    shown = [work for work in Work if work is not Work.LONG or scale.long_prompt]
    handles = [Patch(facecolor=work.value, label=words[work]) for work in shown]
    if scale.peak_kv:
        handles.append(
            Patch(
                facecolor=INK,
                label=f"KV held (full height: {scale.peak_kv * 100:.0f} % of an instance's pool)",
            )
        )
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        title="One block of color is one group: as tall as its degree of parallelism (DoP).",
    )
