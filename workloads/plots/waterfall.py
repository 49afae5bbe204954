"""The picture of the requests that were late most: waits and computation of each, since it arrived."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING

from loong.core.cluster_history import BatchSlice, RequestSpan
from loong.workloads.palette import PINK
from loong.workloads.plots.style import INK, ON_COLOR, PALE_INK, new_figure, say_nothing_to_show
from loong.workloads.report.timeline_cells import Work

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_WIDTH = 6.2
ROW_INCHES = 0.55
NUM_COLUMNS = 2
# A row is 1 high: the bar, and under it words.
BAR_TOP, BAR_HEIGHT, WORDS_TOP = 0.08, 0.34, 0.47
MAX_LETTERS, MAX_LINES = 100, 2  # of words under a bar
WORDS_POINTS = 7
LETTER_SHARE = 0.0115  # of a panel's width, of one letter on a bar
MARGIN, VERDICT_GAP = 1.14, 0.01
TARGET = PINK


@dataclass(frozen=True, slots=True)
class LateRequest:
    """A request with its batches, by their beginnings; `target` is of its first token, in seconds.

    `verdict` says how late it was, and `words` why it waited.
    """

    span: RequestSpan
    batches: Sequence[BatchSlice]
    target: float | None
    is_long: bool
    verdict: str = ""
    words: Sequence[str] = ()

    @property
    def end(self) -> float:
        """Return the seconds from its arrival to its end, or to the last known time."""
        ends = (self.span.ended_at, self.span.first_token_at, *(batch.ended_at for batch in self.batches))
        return max(end for end in (*ends, self.span.arrived_at) if end is not None) - self.span.arrived_at

    def steps(self) -> Iterator[tuple[Work, float, float, BatchSlice]]:
        """Yield the work of each of its batches, with its start and end since the request arrived."""
        first = self.span.first_token_at
        for batch in self.batches:
            is_prefill = first is None or batch.started_at < first
            work = (Work.LONG if self.is_long else Work.SHORT) if is_prefill else Work.DECODE
            yield work, batch.started_at - self.span.arrived_at, batch.ended_at - self.span.arrived_at, batch


def waterfall_figure(late: Mapping[str, Sequence[LateRequest]]) -> "Figure":
    """Return a panel for each title, side by side, all with one scale of time."""
    num_columns = min(NUM_COLUMNS, max(len(late), 1))
    num_rows = -(-len(late) // num_columns)
    most = max((len(requests) for requests in late.values()), default=1) or 1
    figure = new_figure((PANEL_WIDTH * num_columns, num_rows * (ROW_INCHES * most + 0.8) + 0.5))
    panels = figure.subplots(num_rows, num_columns, squeeze=False, sharex=True).flat
    end = max((request.end for requests in late.values() for request in requests), default=1.0) or 1.0
    for panel, (title, requests) in zip(panels, late.items(), strict=False):
        _draw_panel(panel, requests, most, end)
        panel.set_title(title)
        panel.set_xlabel("time since the request came (s)")
    for panel in list(figure.axes)[len(late) :]:
        panel.set_axis_off()
    _draw_legend(figure, [request for requests in late.values() for request in requests])
    return figure


def _draw_panel(panel: "Axes", requests: Sequence[LateRequest], most: int, end: float) -> None:
    for row, request in enumerate(requests):
        _draw_request(panel, row, request, end)
    panel.set_ylim(most, 0.0)
    panel.set_xlim(0.0, end * MARGIN)
    panel.set_yticks(
        [row + BAR_TOP + BAR_HEIGHT / 2 for row in range(len(requests))],
        [f"{request.span.num_prompt_tokens:,} tokens" for request in requests],
        fontsize=WORDS_POINTS + 1,
    )
    panel.tick_params(axis="y", length=0)
    panel.grid(visible=False, axis="y")
    if not requests:
        say_nothing_to_show(panel, "no request is known")


def _draw_request(panel: "Axes", row: int, request: LateRequest, end: float) -> None:
    top = row + BAR_TOP + BAR_HEIGHT / 2
    panel.barh(top, request.end, BAR_HEIGHT, color=PALE_INK, alpha=0.3, linewidth=0)  # what no step covers
    for work, start, stop, batch in request.steps():
        panel.barh(top, stop - start, BAR_HEIGHT, left=start, color=work.value, linewidth=0)
        label = f"DoP {batch.group.dop}"
        if len(label) * LETTER_SHARE < (stop - start) / end:
            panel.text(
                (start + stop) / 2,
                top,
                label,
                ha="center",
                va="center_baseline",
                fontsize=WORDS_POINTS,
                fontweight="bold",
                color=ON_COLOR,
            )
    for time, color, width in _marks(request):
        panel.vlines(
            time, row + BAR_TOP - 0.05, row + BAR_TOP + BAR_HEIGHT + 0.05, color=color, linewidth=width
        )
    panel.text(
        request.end + end * VERDICT_GAP, top, request.verdict, va="center", fontsize=WORDS_POINTS, color=INK
    )
    words = wrap(" ".join(request.words), MAX_LETTERS, max_lines=MAX_LINES, placeholder=" ...")
    panel.text(0.0, row + WORDS_TOP, "\n".join(words), ha="left", va="top", fontsize=WORDS_POINTS, color=INK)


def _marks(request: LateRequest) -> Iterator[tuple[float, str, float]]:
    if request.target is not None and request.target <= request.end:
        yield request.target, TARGET, 2.5
    if request.span.first_token_at is not None:
        yield request.span.first_token_at - request.span.arrived_at, INK, 1.5


def _draw_legend(figure: "Figure", requests: Sequence[LateRequest]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    used = {work for request in requests for work, *_ in request.steps()}
    short = "prefill of a shorter prompt" if Work.LONG in used else "prefill"
    words = {Work.LONG: "prefill of a long prompt", Work.SHORT: short, Work.DECODE: "decode"}
    handles: list[Patch | Line2D] = [Patch(facecolor=PALE_INK, alpha=0.3, label="waits")]
    handles += [Patch(facecolor=work.value, label=words[work]) for work in words if work in used]
    marks = {color for request in requests for _, color, _ in _marks(request)}
    for color, label in ((INK, "first token"), (TARGET, "target of the first token")):
        if color in marks:
            handles.append(Line2D([], [], color=color, marker="|", linestyle="", markersize=9, label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
