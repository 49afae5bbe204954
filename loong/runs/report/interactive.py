"""One self-contained HTML file of the watched runs, to point at, zoom and click in."""

import importlib.util
from collections.abc import Mapping
from html import escape
from pathlib import Path

import jinja2
import msgspec

from loong.core.cluster_history import BatchSlice, ClusterHistory, RequestSpan
from loong.runs.report.watched import WatchedRun
from loong.workloads.plots.queue import WAITING_COLORS
from loong.workloads.plots.style import drawable, styles_of
from loong.workloads.report.timeline_cells import Scale, Work
from loong.workloads.report.waiting import waits_of

FILE_NAME = "interactive.html"
NOT_INTERACTIVE = f"No {FILE_NAME}: it needs plotly; pip install plotly"
MAX_BARS = 12_000  # of a policy: browsers take a second to draw this number
MAX_STORIES = 300  # of a policy that has more requests, only of those that were late most
DIGITS = 6  # of seconds
_PAGE = Path(__file__).parent / "page"


def is_available() -> bool:
    """Return whether plotly is installed, whose library the page holds."""
    return importlib.util.find_spec("plotly") is not None


def interactive_page(watched: Mapping[str, WatchedRun], title: str) -> str:
    """Return the page of at least one run that has batches."""
    from plotly.offline import get_plotlyjs

    histories = {name: one.history for name, one in watched.items()}
    scale = Scale.of(histories.values(), None)
    end = min(map(_shown_until, histories.values()))
    notes = []
    if end < scale.end:
        notes.append(
            f"Shown are the first {end:,.1f} of {scale.end:,.1f} s: with what comes after, bars are too many."
        )
    colors = {name: style.color for name, style in styles_of(histories).items()}
    data = {
        "policies": [_policy(name, one, colors[name], end) for name, one in watched.items()],
        "colors": {work.name.lower(): work.value for work in Work},
        "waiting_colors": {work.name.lower(): color for work, color in WAITING_COLORS.items()},
        "long_prompt": scale.long_prompt,
        "window": [scale.start, min(scale.end, end)],
    }
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((_PAGE / f"{FILE_NAME}.jinja").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        notes=notes,
        data=msgspec.json.encode(data).decode().replace("<", "\\u003c"),  # what a client sent closes no tag
        library=get_plotlyjs(),
        script=(_PAGE / "interactive.js").read_text(encoding="utf-8"),
    )


def _shown_until(history: ClusterHistory) -> float:
    """Return when the bars of a history become too many; infinity if they do not."""
    num_bars = 0
    for batch in sorted(history.batches, key=lambda batch: batch.started_at):
        num_bars += batch.group.dop
        if num_bars > MAX_BARS:
            return batch.started_at
    return float("inf")


def _policy(name: str, one: WatchedRun, color: str, end: float) -> dict[str, object]:
    spans = [span for span in one.history.requests if span.arrived_at <= end]
    place = {span.request_id: index for index, span in enumerate(spans)}
    ratios = {} if one.run is None else dict(zip(one.run.request_ids, one.run.slo_ratios, strict=False))
    reported = one.stories(list(place)) if len(place) <= MAX_STORIES else one.late_stories
    stories = {story.request_id: story.chapters for story in reported}
    return {
        "name": name,
        "label": escape(drawable(name)),  # in texts of plotly, which knows tags
        "color": color,
        "instances": one.history.instance_ids,
        "batches": [_batch(b, place) for b in one.history.batches if b.started_at < end],
        "requests": [
            {**_request(span, ratios.get(span.request_id)), "story": stories.get(span.request_id)}
            for span in spans
        ],
        "waits": [
            {
                "request": place[wait.span.request_id],
                "start": round(wait.start, DIGITS),
                "end": round(wait.end, DIGITS),
            }
            for wait in waits_of(one.history)
            if wait.span.request_id in place and wait.start < end
        ],
    }


def _batch(batch: BatchSlice, place: Mapping[str, int]) -> dict[str, object]:
    return {
        "id": batch.batch_id,
        "group": sorted(batch.group.instance_ids),
        "phase": batch.phase,
        "start": round(batch.started_at, DIGITS),
        "end": round(batch.ended_at, DIGITS),
        "num_prefill_tokens": batch.num_prefill_tokens,
        "longest_prompt": batch.longest_prompt,
        "requests": [place[request_id] for request_id in batch.request_ids if request_id in place],
    }


def _request(span: RequestSpan, ratio: float | None) -> dict[str, object]:
    return {
        "id": span.request_id,
        "prompt": span.num_prompt_tokens,
        "arrived": round(span.arrived_at, DIGITS),
        "first": None if span.first_token_at is None else round(span.first_token_at, DIGITS),
        "ended": None if span.ended_at is None else round(span.ended_at, DIGITS),
        "ratio": ratio,
    }
