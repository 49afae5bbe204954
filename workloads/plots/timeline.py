"""The picture of a run: waiting requests, and below them instances over time, their groups, work and KV.

A group is as tall as its number of instances, so its DoP is its height; the color is its kind of work.
"""

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import groupby
from math import ceil
from typing import TYPE_CHECKING, TypeAlias

from loong.core.cluster_history import ChangeKind, ClusterHistory, InstanceChange
from loong.core.group_changes import GroupChange
from loong.core.placement import InstanceId
from loong.workloads.distributions.scalings import Scaling, scalings_of
from loong.workloads.palette import PINK
from loong.workloads.plots.queue import STRIP_INCHES, WAITING_COLORS, Queue, draw_queue
from loong.workloads.plots.style import INK, ON_COLOR, PALE_INK, PAPER, new_figure, say_nothing_to_show
from loong.workloads.report.timeline_cells import (
    NUM_COLUMNS,
    Cell,
    Row,
    Scale,
    Work,
    group_stretches,
    kv_shares,
    most_by_column,
    rows_of,
    served_stretches,
    stretches,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE_INCHES = 10.0
AXES_INCHES = 9.2  # about, of the time axis
ROW_INCHES = 0.5
MAX_INCHES = 24.0  # of all rows, which are lower for many instances
MIN_LABEL_INCHES = 0.3  # of a row that has room for words
SCALING_MARKERS = {
    GroupChange.GREW: ("^", "scale-up: its group grows"),
    GroupChange.SHRANK: ("v", "scale-down: it shrinks, and keeps the KV"),
}
SCALING_POINTS = 4
CHANGE_MARKS = {  # of instances
    ChangeKind.LOST: ("X", "an instance is lost"),
    ChangeKind.JOINED: ("P", "an instance joins"),
    ChangeKind.DRAINING: ("d", "an instance is to leave"),
    ChangeKind.LEFT: ("s", "an instance leaves"),
}
CHANGE_POINTS = 7
MAX_TICKS = 48
NUM_LEGEND_COLUMNS = 3
LABEL_POINTS = 7
LABEL_INCHES = 0.0095 * LABEL_POINTS  # of one letter
# A row is 1 high: the bar, and under it a line and the strip of KV.
BAR_TOP, BAR_BOTTOM = 0.0, 0.62
SERVED_TOP, SERVED_BOTTOM = 0.62, 0.7  # a line, where an instance serves others
STRIP_TOP, STRIP_BOTTOM = 0.72, 0.94
STRIP_LEVELS = 24
PREFILL_SHARE = 0.7  # of a bar, where a batch also decodes
SERVED_COLOR = PINK
TINT = 0.4  # opacity of a group's color between its rows


Box: TypeAlias = tuple[float, float, float, float]
"""Left and right in seconds, top and bottom in rows."""


def timelines_figure(
    histories: Mapping[str, ClusterHistory], window: tuple[float, float] | None = None
) -> "Figure":
    """Draw a panel for each title on one time axis; `window` is the seconds to show, None for all."""
    num_rows = [max(len(history.instance_ids), 1) for history in histories.values()]
    row_inches = min(ROW_INCHES, MAX_INCHES / sum(num_rows))
    scale = Scale.of(histories.values(), window)
    queues = {title: Queue.of(history, scale) for title, history in histories.items() if history.requests}
    heights = [
        inches
        for title, rows in zip(histories, num_rows, strict=True)
        for inches in ((STRIP_INCHES,) if title in queues else ()) + (row_inches * rows,)
    ]
    figure = new_figure((PICTURE_INCHES, sum(heights) + 0.45 * len(histories) + 1.2))
    panels = iter(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
    most = max((queue.most for queue in queues.values()), default=0.0)
    for title, history in histories.items():
        panel = top = next(panels)
        if title in queues:
            draw_queue(top, queues[title], scale, most)
            panel = next(panels)
        _draw_panel(panel, history, scale, has_labels=row_inches > MIN_LABEL_INCHES)
        top.set_title(title)
    panel.set_xlabel("time since the first request (s)")
    has_served = any(batch.holder_ids for history in histories.values() for batch in history.batches)
    changes = {change.kind for history in histories.values() for change in history.changes}
    _draw_legend(figure, scale, changes, has_queue=bool(queues), has_served=has_served)
    return figure


def _draw_panel(panel: "Axes", history: ClusterHistory, scale: Scale, *, has_labels: bool) -> None:
    rows = rows_of(history, scale)
    height = {instance_id: float(row) for row, instance_id in enumerate(rows)}
    boxes: dict[tuple[str, float], list[Box]] = defaultdict(list)  # by color and opacity
    for instance_id, row in rows.items():
        for color, opacity, box in _bars(instance_id, row, height, scale):
            boxes[color, opacity].append(box)
        boxes[INK, 1.0] += kv_strip(height[instance_id], kv_shares(history, instance_id), scale)
        panel.axhline(height[instance_id] + STRIP_BOTTOM, color=PALE_INK, linewidth=0.4, zorder=1)
    for instance_id, served in served_stretches(history, scale).items():
        for columns in served if instance_id in height else ():
            left, right = scale.time(columns.start), scale.time(columns.stop)
            top = height[instance_id]
            boxes[SERVED_COLOR, 1.0].append((left, right, top + SERVED_TOP, top + SERVED_BOTTOM))
    for (color, opacity), of_color in boxes.items():
        _draw_boxes(panel, of_color, color, opacity)
    if has_labels:
        _draw_labels(panel, rows, height, scale)
    _draw_scalings(panel, list(scalings_of(history)), height, scale)
    _draw_changes(panel, history.changes, height, scale)
    _draw_axes(panel, list(rows), scale)
    if not rows:
        say_nothing_to_show(panel, "no batch ran")


def _bars(
    instance_id: InstanceId, row: Row, height: Mapping[InstanceId, float], scale: Scale
) -> Iterator[tuple[str, float, Box]]:
    """Yield the bars of an instance; those of a group continue, paler, to the next of its rows."""
    top = height[instance_id]
    for cell, columns in stretches(row):
        left, right = scale.time(columns.start), scale.time(columns.stop)
        middle = top + BAR_TOP + (BAR_BOTTOM - BAR_TOP) * (PREFILL_SHARE if cell.decodes else 1.0)
        yield cell.work.value, 1.0, (left, right, top + BAR_TOP, middle)
        if cell.decodes:
            yield Work.DECODE.value, 1.0, (left, right, middle, top + BAR_BOTTOM)
        if instance_id + 1 in cell.members and instance_id + 1 in height:
            yield cell.work.value, TINT, (left, right, top + BAR_BOTTOM, top + 1 + BAR_TOP)


def _draw_boxes(panel: "Axes", boxes: Sequence[Box], color: str, opacity: float) -> None:
    """Draw all boxes of one color as one path, which keeps files small."""
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


def kv_strip(top: float, samples: Sequence[tuple[float, float]], scale: Scale) -> Iterator[Box]:
    """Return the KV of an instance as boxes; equal neighboring columns are one box."""
    if not samples or not scale.peak_kv:
        return
    floor, height = top + STRIP_BOTTOM, STRIP_BOTTOM - STRIP_TOP
    levels = [
        ceil(share / scale.peak_kv * STRIP_LEVELS) for share in most_by_column(samples, scale)
    ]  # any KV at all is visible
    column = 0
    for level, alike in groupby(levels):
        start, column = column, column + len(list(alike))
        if level:
            yield scale.time(start), scale.time(column), floor - height * level / STRIP_LEVELS, floor


def _draw_labels(
    panel: "Axes", rows: Mapping[InstanceId, Row], height: Mapping[InstanceId, float], scale: Scale
) -> None:
    """Name the DoP and the work of each group where it is wide enough for words, on its first row."""
    for instance_id, row in rows.items():
        own = {column: cell for column, cell in row.items() if min(cell.members) == instance_id}
        for cells, columns in group_stretches(own):
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


def _draw_scalings(
    panel: "Axes", scalings: Sequence[Scaling], height: Mapping[InstanceId, float], scale: Scale
) -> None:
    """Mark where groups grow and shrink, on the first row of the group that then is."""
    for change, (marker, _) in SCALING_MARKERS.items():
        shown = [one.batch for one in scalings if one.change is change]
        shown = [batch for batch in shown if scale.start <= batch.started_at < scale.end]
        (marks,) = panel.plot(
            [batch.started_at for batch in shown],
            [height[min(batch.group.instance_ids)] + BAR_TOP for batch in shown],
            linestyle="",
            marker=marker,
            markersize=SCALING_POINTS,
            color=INK,
            clip_on=False,
            zorder=5,
        )
        marks.set_in_layout(False)  # where there are none, they are nowhere


def _draw_changes(
    panel: "Axes", changes: Sequence[InstanceChange], height: Mapping[InstanceId, float], scale: Scale
) -> None:
    """Mark where instances are lost, join, are to leave and leave, on their rows."""
    for kind, (marker, _) in CHANGE_MARKS.items():
        shown = [
            change
            for change in changes
            if change.kind is kind and change.instance_id in height and scale.start <= change.time < scale.end
        ]
        if shown:
            panel.plot(
                [change.time for change in shown],
                [height[change.instance_id] + (BAR_TOP + BAR_BOTTOM) / 2 for change in shown],
                linestyle="",
                marker=marker,
                markersize=CHANGE_POINTS,
                color=INK,
                markeredgecolor=PAPER,
                zorder=6,
            )


def _labels(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the labels of a stretch, the longest first."""
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
    named = range(0, len(instance_ids), len(instance_ids) // MAX_TICKS + 1)
    middle = (BAR_TOP + BAR_BOTTOM) / 2
    panel.set_yticks([row + middle for row in named], [str(instance_ids[row]) for row in named])
    panel.tick_params(axis="y", length=0)
    panel.set_ylim(max(len(instance_ids), 1), 0.0)  # the first instance on top
    panel.set_xlim(scale.start, scale.end)
    panel.grid(visible=False)


def _draw_legend(
    figure: "Figure", scale: Scale, changes: Container[str], *, has_queue: bool, has_served: bool
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    words = {
        Work.LONG: f"prefill of long prompts ({scale.long_prompt:,} tokens or more)",
        Work.SHORT: "prefill of shorter prompts" if scale.long_prompt else "prefill",
        Work.DECODE: "decode; below a prefill, in one batch with it",
    }
    shown = [work for work in Work if work is not Work.LONG or scale.long_prompt]
    handles: list[Patch | Line2D] = [Patch(facecolor=work.value, label=words[work]) for work in shown]
    handles.append(Patch(facecolor=Work.DECODE.value, alpha=TINT, label="paler: joins the rows of one group"))
    if has_served:
        words_of_line = "line: serves KV to a batch that runs elsewhere"
        handles.append(Patch(facecolor=SERVED_COLOR, label=words_of_line))
    if has_queue:
        kinds = {
            Work.LONG: "a long prompt",
            Work.SHORT: "a shorter prompt" if scale.long_prompt else "a prompt",
        }
        handles += [
            Patch(facecolor=WAITING_COLORS[work], label=f"{kinds[work]} waits, or its answer")
            for work in shown[:-1]
        ]
        for work in shown[:-1]:
            tick = Line2D([], [], color=work.value, marker="|", linestyle="", markersize=9)
            tick.set_label(f"{kinds[work]} arrives")
            handles.append(tick)
    marks = [
        (marker, SCALING_POINTS, words_of_change) for marker, words_of_change in SCALING_MARKERS.values()
    ]
    marks += [(m, CHANGE_POINTS, what) for kind, (m, what) in CHANGE_MARKS.items() if kind in changes]
    for marker, size, what in marks:
        mark = Line2D([], [], color=INK, marker=marker, linestyle="", markersize=size)
        mark.set_label(what)
        handles.append(mark)
    if scale.peak_kv:
        words_of_kv = f"KV held (full height: {scale.peak_kv * 100:.0f} % of an instance's pool)"
        handles.append(Patch(facecolor=INK, label=words_of_kv))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), NUM_LEGEND_COLUMNS),
        title="One block of color is one group: as tall as its degree of parallelism (DoP)."
        + (" Above: requests that no batch has." if has_queue else ""),
    )
