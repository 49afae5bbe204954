"""The room that instances have lent each other: who lent what to whom, since when and why."""

from collections.abc import Iterator, Sequence

import msgspec

from loong.core.decision import DecisionKind
from loong.observability.decision_log.lines import (
    InstanceDrainingLine,
    InstanceJoinedLine,
    RoomLentLine,
    RoomReturnedLine,
)
from loong.observability.decision_log.story.index import Considered, LogIndex, MovedKV, Ran
from loong.observability.decision_log.story.phrases import counted

MAX_LOANS = 10  # that are listed
_ROOM = {
    RoomLentLine: "lends",
    RoomReturnedLine: "has its room again",
    InstanceJoinedLine: "joins",
    InstanceDrainingLine: "is to leave",
}


class Loan(msgspec.Struct):
    """All that one instance lent another: tokens of KV that went there, and of those that came back.

    `since` is the time of the first, in seconds, and `reason` the policy's for the last.
    """

    creditor_id: int
    debtor_id: int
    since: float
    num_lent_tokens: int = 0
    num_returned_tokens: int = 0
    request_ids: tuple[str, ...] = ()
    reason: str = ""


def loans_of(index: LogIndex) -> list[Loan]:
    """Return the loans between each two instances, the largest first.

    The debtor of a request's KV is the instance that computes it. What goes from one creditor to another is
    returned by the first, and lent by the second.
    """
    loans: dict[tuple[int, int], Loan] = {}
    for entries in index.entries.values():
        home_id, reasons = None, dict[float, str]()
        for entry in entries:
            if isinstance(entry, Ran):
                home_id = entry.batch.instance_ids[0]
            elif isinstance(entry, Considered) and entry.reason.kind is DecisionKind.LEND:
                reasons[entry.plan.time] = entry.reason.chosen
            elif isinstance(entry, MovedKV) and home_id is not None and entry.plan.time in reasons:
                _add(loans, entry, home_id, reasons[entry.plan.time])
    return sorted(loans.values(), key=lambda loan: (-loan.num_lent_tokens, loan.since))


def loan_words(loans: Sequence[Loan]) -> Iterator[str]:
    """Yield lines on the largest loans; none if nothing was lent."""
    if not loans:
        return
    total = sum(loan.num_lent_tokens for loan in loans)
    yield f"Instances lent each other room for {counted(total, 'token')} of KV:"
    for loan in loans[:MAX_LOANS]:
        yield (
            f"  instance {loan.creditor_id} to {loan.debtor_id} since {loan.since:.3f} s: "
            f"{loan.num_lent_tokens:,} of {counted(len(loan.request_ids), 'request')}, "
            f"{loan.num_returned_tokens:,} returned; last: {loan.reason}"
        )
    if others := loans[MAX_LOANS:]:
        yield f"  and {counted(len(others), 'smaller loan')}"


def room_words(index: LogIndex) -> Iterator[str]:
    """Yield lines on the latest loans of an engine among others; none if there were none."""
    if index.room:
        yield "Room of engines for each other:"
    for line in index.room[-MAX_LOANS:]:
        yield f"  {line.time:.3f} s: instance {line.instance_id} {_ROOM[type(line)]}: {line.why}"


def _add(loans: dict[tuple[int, int], Loan], moved: MovedKV, home_id: int, reason: str) -> None:
    """Add a migration of KV of a request at home on an instance."""
    migration = moved.migration
    for instance_id, is_lent in ((migration.destination_id, True), (migration.source_id, False)):
        if instance_id == home_id:
            continue
        key = instance_id, home_id
        loan = loans.setdefault(key, Loan(*key, since=moved.time))
        loan.reason = reason
        if is_lent:
            loan.num_lent_tokens += migration.num_tokens
        else:
            loan.num_returned_tokens += migration.num_tokens
        if migration.request_id not in loan.request_ids:
            loan.request_ids = (*loan.request_ids, migration.request_id)
