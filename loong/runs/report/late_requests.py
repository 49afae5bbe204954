"""The requests of a run that were late most, with their stories."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from loong.core.cluster_history import ClusterHistory, RequestSpan
from loong.observability.decision_log.story.index import LogIndex
from loong.observability.decision_log.story.story import story_of
from loong.observability.decision_log.story.words import chapters, heading, why_it_waited
from loong.workloads.plots.waterfall import LateRequest
from loong.workloads.report.run_document import RunRow
from loong.workloads.report.timeline_cells import long_prompt_of
from loong.workloads.report.waiting import batches_of_requests

NUM_LATE = 10
NO_WAIT = "It waited for nothing: its steps took that long."
UNKNOWN_REASON = "No decision log says why."


@dataclass(frozen=True, slots=True)
class RequestStory:
    """A request's story, as in `loong explain`: sentences at the top, and more by time since arrival."""

    request_id: str
    heading: Sequence[str]
    chapters: Sequence[tuple[str, Sequence[str]]]


def late_requests(
    history: ClusterHistory, run: RunRow | None = None, index: LogIndex | None = None
) -> list[LateRequest]:
    """Return the ten that exceed their SLO most, the worst first.

    Without a run, return those slowest to a token.

    Requests that failed come first.
    """
    ratios, targets = _by_id(run, run.slo_ratios if run else ()), _by_id(run, run.ttft_targets if run else ())
    spans = [span for span in history.requests if not ratios or span.request_id in ratios]

    def lateness(span: RequestSpan) -> float:
        if ratios:
            ratio = ratios[span.request_id]
            return inf if ratio is None else ratio
        return inf if span.first_token_at is None else span.first_token_at - span.arrived_at

    long_prompt = long_prompt_of(history.batches)
    batches = batches_of_requests(history)
    return [
        LateRequest(
            span,
            batches.get(span.request_id, ()),
            targets.get(span.request_id),
            0 < long_prompt <= span.num_prompt_tokens,
            _verdict(ratios.get(span.request_id, inf)) if ratios else "",
            _words(index, span.request_id),
        )
        for span in sorted(spans, key=lateness, reverse=True)[:NUM_LATE]
    ]


def stories_of(index: LogIndex, request_ids: Sequence[str]) -> list[RequestStory]:
    """Return the stories of those requests that the log knows."""
    return [_reported(index, request_id) for request_id in request_ids if request_id in index.arrivals]


def _reported(index: LogIndex, request_id: str) -> RequestStory:
    story = story_of(index, request_id)
    parts = [(f"+{time:.3f} s", list(sentences)) for time, sentences in chapters(story)]
    return RequestStory(request_id, list(heading(story)), parts)


def _by_id(run: RunRow | None, values: Sequence[float | None]) -> dict[str, float | None]:
    ids = () if run is None else run.request_ids
    return {request_id: value for request_id, value in zip(ids, values, strict=False) if request_id}


def _verdict(ratio: float | None) -> str:
    return "failed" if ratio is None else f"{ratio:.2g} x its SLO"


def _words(index: LogIndex | None, request_id: str) -> tuple[str, ...]:
    if index is None or request_id not in index.arrivals:
        return (UNKNOWN_REASON,)
    return tuple(why_it_waited(story_of(index, request_id))) or (NO_WAIT,)
