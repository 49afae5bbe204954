"""Sentences on failed requests and their reasons."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec

from loong.workloads.plots.curves import at_rate
from loong.workloads.report.run_document import RuleRuns, RunRow

MAX_REASONS, MAX_LETTERS = 3, 200
NO_REASON = "no reason is known"


def failures_of(runs: RuleRuns) -> Iterator[str]:
    """Yield a sentence for each policy and rate at which requests failed, the commonest reasons first."""
    for policy in runs.policies:
        for rate in runs.rates:
            repeats = runs.at(policy, rate)
            sent, completed = (
                sum(getattr(run, key) for run in repeats) for key in ("num_prompts", "completed")
            )
            if completed < sent:
                yield (
                    f"{sent - completed:,} of {sent:,} requests of {policy} failed {at_rate(rate)} and count "
                    f"as misses: {_reasons(repeats, sent - completed)}."
                )


class _Error(msgspec.Struct):
    message: str


class _Answer(msgspec.Struct):
    error: _Error


def _short(reason: str) -> str:
    """Return the message alone where a server answered with an error of the OpenAI API."""
    status, brace, rest = reason.partition("{")
    with suppress(msgspec.MsgspecError):
        reason = status + msgspec.json.decode((brace + rest).encode(), type=_Answer).error.message
    return reason if len(reason) <= MAX_LETTERS else f"{reason[:MAX_LETTERS]} ..."


def _reasons(runs: Sequence[RunRow], num_failed: int) -> str:
    counts = Counter(_short(error) for run in runs for error in run.errors if error)
    reported = [f"{count:,} x {reason}" for reason, count in counts.most_common(MAX_REASONS)]
    if more := sum(counts.values()) - sum(count for _, count in counts.most_common(MAX_REASONS)):
        reported.append(f"{more:,} x other reasons")
    if unknown := num_failed - sum(counts.values()):
        reported.append(f"{unknown:,} x {NO_REASON}" if reported else NO_REASON)
    return "; ".join(reported)
