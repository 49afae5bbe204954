"""The strip above the instances of a run: arrivals and waiting requests, by length of prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loong.core.cluster_history import ClusterHistory
from loong.workloads.plots.style import INK, PALE_INK
from loong.workloads.report.timeline_cells import NUM_COLUMNS, Scale, Work
from loong.workloads.report.waiting import waiting_by_column, waits_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STRIP_INCHES = 0.62
WAITING_COLORS = {Work.LONG: "#e58a5a", Work.SHORT: "#4a9fd6"}  # of the work's hue, on any paper
TICK_SHARE = 0.2  # of the strip, for arrivals
DIGITS = 2  # of how many wait in the mean of a column
MIN_MOST = 1.0  # that the strip has room for


@dataclass(frozen=True, slots=True)
class Queue:
    """Arrivals and the number of waiting requests in each column, by length class, longest first."""

    arrivals: Mapping[Work, Sequence[float]]
    waiting: Mapping[Work, Sequence[float]]

    @staticmethod
    def of(history: ClusterHistory, scale: Scale) -> "Queue":
        """Return the queue of a run, in the seconds that are shown."""
        waits = list(waits_of(history))
        classes = [work for work in (Work.LONG, Work.SHORT) if work is Work.SHORT or scale.long_prompt]
        return Queue(
            {
                work: [
                    span.arrived_at
                    for span in history.requests
                    if class_of(span.num_prompt_tokens, scale) is work
                    and scale.start <= span.arrived_at <= scale.end
                ]
                for work in classes
            },
            {
                work: waiting_by_column(
                    (wait for wait in waits if class_of(wait.span.num_prompt_tokens, scale) is work), scale
                )
                for work in classes
            },
        )

    @property
    def most(self) -> float:
        """Return the most that waited at a time."""
        return max((sum(counts) for counts in zip(*self.waiting.values(), strict=True)), default=0.0)


def class_of(num_prompt_tokens: int, scale: Scale) -> Work:
    """Return the length class of a prompt."""
    return Work.LONG if 0 < scale.long_prompt <= num_prompt_tokens else Work.SHORT


def _draw_area(panel: "Axes", floor: Sequence[float], top: Sequence[float], scale: Scale, work: Work) -> None:
    """Fill between two levels a column; equal neighboring columns are one step, which keeps files small."""
    edges: list[float] = []
    levels: list[tuple[float, float]] = []
    for column, (low, high) in enumerate(zip(floor, top, strict=True)):
        level = round(low, DIGITS), round(high, DIGITS)
        if not levels or level != levels[-1]:
            edges.append(scale.time(column))
            levels.append(level)
    lows, highs = zip(*levels, strict=True)
    panel.stairs(
        highs,
        [*edges, scale.end],
        baseline=lows,
        fill=True,
        color=WAITING_COLORS[work],
        linewidth=0,
    )


def draw_queue(panel: "Axes", queue: Queue, scale: Scale, most: float) -> None:
    """Draw the strip; `most` is its greatest number, the same in all strips of a picture."""
    most = max(most, MIN_MOST)
    floor = [0.0] * NUM_COLUMNS
    for work, counts in queue.waiting.items():
        top = [below + count for below, count in zip(floor, counts, strict=True)]
        _draw_area(panel, floor, top, scale, work)
        floor = top
    panel.axhline(most, color=PALE_INK, linewidth=0.4)
    for work, times in queue.arrivals.items():
        panel.vlines(times, most, most * (1 + TICK_SHARE), color=work.value, linewidth=1.0)
    panel.set_ylim(0, most * (1 + TICK_SHARE))
    panel.set_yticks([0, round(most)] if most >= 1 else [0])
    panel.set_ylabel("waiting", color=INK)
    panel.grid(visible=False)
