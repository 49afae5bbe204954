"""The history of one request: targets and results, the state at its arrival, and each step."""

import msgspec

from loong.core.request import RequestId
from loong.observability.decision_log.story.fold import folded
from loong.observability.decision_log.story.found import StoryFindings, found_by
from loong.observability.decision_log.story.index import LogIndex
from loong.observability.decision_log.story.steps import StoryStep
from loong.observability.decision_log.story.summary import Summary, summary_of
from loong.observability.decision_log.story.trail import trail_of


class Story(msgspec.Struct, frozen=True):
    """A request's history. `clock_start` is the Unix time of the clock's 0, or None in virtual time."""

    summary: Summary
    found: StoryFindings
    steps: tuple[StoryStep, ...]
    log_ends_at: float
    clock_start: float | None


def story_of(index: LogIndex, request_id: RequestId) -> Story:
    """Return the history of a request whose arrival the log contains."""
    return Story(
        summary_of(index, request_id),
        found_by(index, request_id),
        folded(trail_of(index, request_id)),
        log_ends_at=index.last_time,
        clock_start=index.clock_start,
    )
