"""A list of all requests of a log, one line each."""

from collections.abc import Sequence

from loong.observability.decision_log.story.phrases import counted, duration, times
from loong.observability.decision_log.story.summary import Latency, Summary

_HEADINGS = ("request", "came", "waited", "TTFT", "TPOT", "prompt", "output", "DoP", "notes")
_LEFT = (0, 8)  # columns of words


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


def listing(summaries: Sequence[Summary]) -> str:
    """Return a heading and a table, in the order given."""
    rows = [_HEADINGS, *map(_row, summaries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    return "\n".join([_heading(summaries), "", *lines])


def _heading(summaries: Sequence[Summary]) -> str:
    promised = [s for s in summaries if s.ttft.slo is not None or s.tpot.slo is not None]
    num_missed = sum(s.ttft.is_late or s.tpot.is_late for s in promised)
    heading = f"{counted(len(summaries), 'request')}, most delayed first; waits between batches count."
    if not promised:
        return heading
    return f"{heading} {num_missed:,} of {counted(len(promised), 'request')} with an SLO missed it (!)."


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (
        cell.ljust(width) if column in _LEFT else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join(cells).rstrip()


def _row(summary: Summary) -> tuple[str, ...]:
    dops = summary.dops
    return (
        summary.request_id,
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
    """Return the unusual events of a request: preemptions, migrations, lost KV, an early end."""
    incidents = []
    if summary.num_preemptions:
        incidents.append(f"preempted {times(summary.num_preemptions)}")
    if summary.num_moved_tokens:
        incidents.append(f"{counted(summary.num_moved_tokens, 'token')} moved")
    if summary.num_losses:
        incidents.append(f"lost KV {times(summary.num_losses)}")
    if summary.end is None:
        incidents.append("not over")
    elif summary.end not in ("length", "stop"):
        incidents.append(summary.end)
    return incidents
