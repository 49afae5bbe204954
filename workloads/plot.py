"""The picture of a run: instances over time, colored by group, with the KV each one holds."""

import importlib.util
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loong.core.errors import ConfigError
from loong.workloads.timeline import KVSample, Timeline, TimelineSlice

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colors, told apart by people with any common color blindness. Past the seventh group the
# colors repeat with a hatch.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
HATCHES = ("", "///", "...", "xxx")
PHASE_OPACITY = {"prefill": 1.0, "mixed": 0.75, "decode": 0.45}

PICTURE_INCHES = 14.0
ROW_INCHES = 0.55
DOTS_PER_INCH = 120
LABEL_POINTS = 7
LABEL_GAP = 0.01  # of the time axis: steps closer than this share a label
# Heights over the middle of a row, which is 1 high: the bar, and under it the strip of KV.
BAR_TOP, BAR_BOTTOM = 0.42, -0.12
STRIP_BOTTOM, STRIP_GAP = -0.42, 0.04

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Scale:
    """What all panels share: the last second, the most KV tokens, and a color and hatch for each group."""

    end: float
    peak_kv_tokens: int
    styles: dict[Group, tuple[str, str]]

    @staticmethod
    def of(timelines: Collection[Timeline]) -> "_Scale":
        groups = {tuple(sorted(s.group)) for timeline in timelines for s in timeline.slices}
        by_size = sorted(groups, key=lambda group: (len(group), group))
        return _Scale(
            end=max((timeline.end for timeline in timelines), default=0.0) or 1.0,
            peak_kv_tokens=max((k.num_tokens for t in timelines for k in t.kv_samples), default=0),
            styles={
                group: (COLORS[i % len(COLORS)], HATCHES[i // len(COLORS) % len(HATCHES)])
                for i, group in enumerate(by_size)
            },
        )


def is_available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Raise `ConfigError` if matplotlib is not installed."""
    if not is_available():
        raise ConfigError("pictures need matplotlib; pip install 'loong[bench]'")


def plot_timelines(timelines: Mapping[str, Timeline], paths: Sequence[Path]) -> None:
    """Draw one panel a policy on one time axis, and write the picture to every path, by its suffix.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_rows = [max(len(timeline.instance_ids), 1) for timeline in timelines.values()]
    height = sum(ROW_INCHES * rows + 1.0 for rows in num_rows) + 0.8
    figure = Figure(figsize=(PICTURE_INCHES, height), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=num_rows)[:, 0]
    scale = _Scale.of(timelines.values())
    for panel, (policy, timeline) in zip(panels, timelines.items(), strict=True):
        _draw_panel(panel, policy, timeline, scale)
    panels[-1].set_xlabel("time since the first batch (s)")
    _draw_legend(figure, scale)
    for path in paths:
        figure.savefig(path)


def _draw_panel(panel: "Axes", policy: str, timeline: Timeline, scale: _Scale) -> None:
    pixel = scale.end / (PICTURE_INCHES * DOTS_PER_INCH)
    rows = {instance_id: row for row, instance_id in enumerate(timeline.instance_ids)}
    for piece in timeline.merged(gap=pixel).slices:
        _draw_slice(panel, rows[piece.instance_id], piece, scale)
    for stretch in timeline.merged(gap=LABEL_GAP * scale.end).slices:
        _label(panel, rows[stretch.instance_id], stretch, scale)
    for instance_id, row in rows.items():
        samples = [k for k in timeline.kv_samples if k.instance_id == instance_id]
        _draw_kv(panel, row, samples, scale)
    title = policy
    if timeline.kv_samples:
        title += f"   (gray strip: KV held, full height {scale.peak_kv_tokens:,} tokens)"
    panel.set_title(title, loc="left", fontsize=10)
    panel.set_ylabel("instance")
    panel.set_yticks(list(rows.values()), [str(instance_id) for instance_id in rows])
    panel.set_ylim(max(len(rows), 1) - 0.5, -0.5)  # instance 0 on top
    panel.set_xlim(0.0, scale.end)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_slice(panel: "Axes", row: int, piece: TimelineSlice, scale: _Scale) -> None:
    color, hatch = scale.styles[tuple(sorted(piece.group))]
    duration = piece.end - piece.start
    panel.broken_barh(
        [(piece.start, duration)],
        (row - BAR_TOP, BAR_TOP - BAR_BOTTOM),
        facecolor=color,
        alpha=PHASE_OPACITY.get(piece.phase, 1.0),
        hatch=hatch,
        edgecolor="white",
        linewidth=0.3,
    )


def _label(panel: "Axes", row: int, stretch: TimelineSlice, scale: _Scale) -> None:
    """Name DoP and phase of steps that follow each other closely, if they are wide enough for the words."""
    label = f"DoP {stretch.dop} {stretch.phase}"
    label_inches = len(label) * LABEL_POINTS * 0.6 / 72
    duration = stretch.end - stretch.start
    if duration / scale.end * PICTURE_INCHES * 0.9 > label_inches:
        center = (stretch.start + duration / 2, row - (BAR_TOP + BAR_BOTTOM) / 2)
        panel.annotate(label, center, ha="center", va="center", fontsize=LABEL_POINTS)


def _draw_kv(panel: "Axes", row: int, samples: Sequence[KVSample], scale: _Scale) -> None:
    if not samples or not scale.peak_kv_tokens:
        return
    floor = row - STRIP_BOTTOM
    height = BAR_BOTTOM - STRIP_BOTTOM - STRIP_GAP
    times = [k.time for k in samples] + [scale.end]
    tokens = [k.num_tokens for k in samples] + [samples[-1].num_tokens]
    tops = [floor - height * count / scale.peak_kv_tokens for count in tokens]
    panel.fill_between(times, floor, tops, step="post", color="#555555", linewidth=0)


def _draw_legend(figure: "Figure", scale: _Scale) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", label="+".join(map(str, group)))
        for group, (color, hatch) in scale.styles.items()
    ]
    handles += [
        Patch(facecolor="black", alpha=opacity, label=phase) for phase, opacity in PHASE_OPACITY.items()
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=10, fontsize=8, title="instances of the group"
    )
