"""Requests of a log: what all of them waited for, and a table of a few with their reasons, or of all."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, starmap, takewhile, zip_longest
from operator import eq

from loong.core.request import FinishReason, RequestId
from loong.observability.decision_log.story.phrases import capital, counted, duration, times
from loong.observability.decision_log.story.steps import WaitedFor, summed
from loong.observability.decision_log.story.summary import Latency, Summary
from loong.observability.decision_log.story.words import MIN_SHOWN_SECONDS, filled

NO_REASON = "batches of others ran, and the policy gave no reason"
MIN_SHARE = 0.01  # of all waiting, from which a reason is listed
MAX_REASONS = 5
MIN_LETTERS = 14  # of an id's beginning

_HEADINGS = ("request", "came", "waited", "TTFT", "TPOT", "prompt", "output", "DoP", "notes")
_LEFT = (0, 8)  # columns of words
_INDENT = " " * 4


def most_delayed_first(summaries: Sequence[Summary]) -> list[Summary]:
    """Return the summaries in order of waiting time, then of time to first token.

    None sorts as the longest.
    """
    never = float("inf")
    return sorted(
        summaries,
        key=lambda summary: (
            summary.waited_seconds,
            never if summary.ttft.seconds is None else summary.ttft.seconds,
        ),
        reverse=True,
    )


def overview(summaries: Sequence[Summary]) -> Iterator[str]:
    """Yield lines on all requests: how many were late, and what they waited for, the longest first."""
    yield _late(summaries)
    waited = sum(summary.waited_seconds for summary in summaries)
    if not waited:
        yield "None of them waited."
        return
    yield f"They waited {duration(waited)} in all, between batches too:"
    each = summed(wait for summary in summaries for wait in waited_for(summary))
    reasons = [wait for wait in each if wait.seconds >= MIN_SHARE * waited]
    column = max((len(duration(wait.seconds)) for wait in reasons), default=0)
    for wait in reasons[:MAX_REASONS]:
        yield f"  {duration(wait.seconds).rjust(column)}  {wait.reason}"


def beginnings(request_ids: Iterable[RequestId]) -> Mapping[RequestId, str]:
    """Return for each id its beginning that no other id shares, of at least `MIN_LETTERS`."""
    ordered = sorted(request_ids)
    shared = [0, *starmap(_num_shared, pairwise(ordered)), 0]
    most = map(max, pairwise(shared))
    return {i: i[: max(MIN_LETTERS, num + 1)] for i, num in zip(ordered, most, strict=True)}


def _num_shared(one: str, other: str) -> int:
    """Return the number of letters with which both begin."""
    return sum(1 for _ in takewhile(bool, map(eq, one, other)))


def table(
    summaries: Sequence[Summary], names: Sequence[str] = (), reasons: Sequence[Sequence[str]] = ()
) -> Iterator[str]:
    """Yield a row for each request in the order given, under other names and with its reasons if given."""
    names = names or [summary.request_id for summary in summaries]
    rows = [_HEADINGS, *((name, *_cells(summary)) for name, summary in zip(names, summaries, strict=True))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, sentences in zip_longest(rows, ((), *reasons), fillvalue=()):
        yield _line(row, widths)
        if sentences:
            yield filled(" ".join(sentences), _INDENT, _INDENT)


def waited_for(summary: Summary) -> tuple[WaitedFor, ...]:
    """Return the reasons of a request for all of its waiting, the longest first.

    What the policy's reasons do not cover has one of its own, unless it is too short to matter.
    """
    covered = sum(wait.seconds for wait in summary.waited_for)
    rest = WaitedFor(NO_REASON, summary.waited_seconds - covered)
    return summed((*summary.waited_for, rest) if rest.seconds >= MIN_SHOWN_SECONDS else summary.waited_for)


def _late(summaries: Sequence[Summary]) -> str:
    promised = [s for s in summaries if s.ttft.slo is not None or s.tpot.slo is not None]
    num_missed = sum(s.ttft.is_late or s.tpot.is_late for s in promised)
    if not promised:
        return f"{capital(counted(len(summaries), 'request'))}, of which no targets are known."
    late = f"{num_missed:,} of {counted(len(promised), 'request')} with targets missed one (!)"
    ttft, tpot = sum(s.ttft.is_late for s in promised), sum(s.tpot.is_late for s in promised)
    return f"{late}: {ttft:,} to the first token, {tpot:,} between tokens." if num_missed else f"{late}."


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (
        cell.ljust(width) if column in _LEFT else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join(cells).rstrip()


def _cells(summary: Summary) -> tuple[str, ...]:
    """Return the cells of a row but its name."""
    dops = summary.dops
    return (
        f"{summary.arrived_at:.3f} s",
        duration(summary.waited_seconds),
        _latency(summary.ttft),
        _latency(summary.tpot),
        f"{summary.num_prompt_tokens:,}",
        "" if summary.num_output_tokens is None else f"{summary.num_output_tokens:,}",
        f"{dops[0]}-{dops[-1]}" if len(dops) > 1 else "".join(map(str, dops)),
        ", ".join(_incidents(summary)),
    )


def _latency(latency: Latency) -> str:
    value = "none" if latency.seconds is None else duration(latency.seconds)
    return value + (" !" if latency.is_late else "  ")


def _incidents(summary: Summary) -> list[str]:
    """Return the unusual events of a request: cached, moved and lost KV, preemptions, an early end."""
    incidents = []
    if summary.num_cached_tokens:
        incidents.append(f"{counted(summary.num_cached_tokens, 'token')} cached")
    if summary.num_preemptions:
        incidents.append(f"preempted {times(summary.num_preemptions)}")
    if summary.num_moved_tokens:
        incidents.append(f"{counted(summary.num_moved_tokens, 'token')} moved")
    if summary.num_losses:
        incidents.append(f"lost KV {times(summary.num_losses)}")
    if summary.end is None:
        incidents.append("not over")
    elif summary.end not in (FinishReason.LENGTH, FinishReason.STOP):
        incidents.append(summary.end)
    return incidents
