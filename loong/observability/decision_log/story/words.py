"""A request's history as text, with times since its arrival."""

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from operator import itemgetter
from textwrap import fill

from loong.observability.decision_log.story.arrival_words import arrival_words
from loong.observability.decision_log.story.phrases import (
    change_words,
    counted,
    difference,
    duration,
    wait_words,
)
from loong.observability.decision_log.story.run_words import rest_words
from loong.observability.decision_log.story.step_words import step_words, submitted_at
from loong.observability.decision_log.story.steps import ComputedBatches, Wait
from loong.observability.decision_log.story.story import Story
from loong.observability.decision_log.story.summary import Latency, Summary

WIDTH = 110
MIN_SHOWN_SECONDS = 0.001  # seconds; a summary leaves out shorter waits
_TIME_WIDTH = 11
_INDENT = " " * (_TIME_WIDTH + 2)


def reported(story: Story) -> str:
    """Return the history, at most 110 columns wide."""
    lines = [filled(sentence) for sentence in heading(story)]
    lines.append("")
    for time, sentences in chapters(story):
        lines += _at(time, sentences)
    return "\n".join(lines)


def chapters(story: Story) -> Iterator[tuple[float, Iterator[str]]]:
    """Yield the seconds since the arrival, and the sentences for that time."""
    yield 0.0, arrival_words(story)
    for step in story.steps:
        since = submitted_at(step, story) - story.summary.arrived_at
        yield max(0.0, since), step_words(step, story)  # the log rounds each time on its own


def why_it_waited(story: Story) -> Iterator[str]:
    """Yield sentences on the reasons for waiting, the longest wait first."""
    waits: list[tuple[float, list[str]]] = []
    for step in story.steps:
        if isinstance(step, Wait):
            seconds = (story.log_ends_at if step.until is None else step.until) - step.time
            why = (*wait_words(step.waited_for), *change_words(step.changes))
            waits.append((seconds, [next(step_words(step, story)), *why]))
        elif isinstance(step, ComputedBatches):
            waits.append((sum(part.paused_seconds for part in step.parts), list(rest_words(step))))
    for seconds, sentences in sorted(waits, key=itemgetter(0), reverse=True):
        if seconds >= MIN_SHOWN_SECONDS:
            yield from sentences


def _at(time: float, sentences: Iterable[str]) -> Iterator[str]:
    """Yield sentences one below the other, the first next to the time."""
    label = f"+{time:.3f} s".rjust(_TIME_WIDTH) + "  "
    for sentence in sentences:
        yield filled(sentence, label, _INDENT + "  ")
        label = _INDENT


def filled(text: str, first_indent: str = "", indent: str = "") -> str:
    """Return lines of the given width that keep numbers and units together."""
    glued = re.sub(r"(\d) (?=m?s\b)", "\\1\u00a0", text)
    filled = fill(glued, WIDTH, initial_indent=first_indent, subsequent_indent=indent)
    return filled.replace("\u00a0", " ")


def heading(story: Story) -> Iterator[str]:
    """Yield the request, its targets and results, and its waiting time."""
    summary = story.summary
    user = f" of user {_harmless(summary.user)}" if summary.user else ""
    prompt, output = counted(summary.num_prompt_tokens, "token"), counted(summary.max_tokens, "token")
    yield f"Request {summary.request_id}{user}: a prompt of {prompt}, at most {output} of output."
    came = f"It came at {summary.arrived_at:.3f} s"
    if story.clock_start is not None:
        at = datetime.fromtimestamp(story.clock_start + summary.arrived_at, UTC)
        came += f" of the run, {at:%Y-%m-%d %H:%M:%S} UTC"
    yield f"{came}. {_verdict(summary)}"
    waited = (
        f"It waited {duration(summary.waited_seconds)} in all"
        if summary.waited_seconds
        else "It never waited"
    )
    yield f"{'; '.join((waited, *steps_took(summary)))}."


def steps_took(summary: Summary) -> Iterator[str]:
    """Yield words on the time of its steps, if they have predictions."""
    if summary.predicted_seconds:
        measured, predicted = summary.measured_seconds, summary.predicted_seconds
        yield f"its steps took {duration(measured)}, {difference(measured, predicted)}"


def _harmless(name: str) -> str:
    """Return a client's name without control characters for the terminal."""
    return name if name.isprintable() else ascii(name)


def _verdict(summary: Summary) -> str:
    ttft, tpot = summary.ttft, summary.tpot
    if ttft.seconds is None:
        return f"It got no token{_promise(ttft) if ttft.is_late else ''}."
    words = f"Its first token came after {duration(ttft.seconds)}{_promise(ttft)}"
    if tpot.seconds is not None:
        words += f"; then each took {duration(tpot.seconds)}{_promise(tpot)}"
    return f"{words}."


def _promise(latency: Latency) -> str:
    if latency.slo is None:
        return ""
    return f", {'over' if latency.is_late else 'within'} its SLO of {duration(latency.slo)}"
