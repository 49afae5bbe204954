"""The verdict on a run under faults, as a table and as JSON."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

from loong.core.request import TokenId
from loong.engine.faults import FaultKind
from loong.launcher.chaos.differences import Differences, differences
from loong.launcher.chaos.server import ServerTotals
from loong.launcher.chaos.streams import Ending, StreamRecord

EFFECT_SECONDS = 1.0  # after a fault, in which a stream that it hits stops
_WIDTH = 18  # of the headings


@dataclass(frozen=True, slots=True)
class Fault:
    """An injected fault, at a time of the run. `recovery` is None if no open stream had a token.

    `recovery` is the longest time in which one of `num_streams` open streams waited for its next token. An
    engine that is killed has no `instance_id`, and a server of one engine no `engine_id`.
    """

    kind: FaultKind
    instance_id: int | None
    injected_at: float
    recovery: float | None = None
    num_streams: int = 0
    engine_id: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a run. `failures` and `skipped` count requests and faults by their reasons."""

    num_sent: int
    endings: Mapping[Ending, int]
    failures: Mapping[str, int]
    losses: Mapping[str, int]
    num_tokens: int
    differences: Differences
    faults: Sequence[Fault]
    skipped: Mapping[str, int]
    before: ServerTotals
    after: ServerTotals
    health: str
    is_interrupted: bool

    @property
    def is_whole(self) -> bool:
        """Return whether no request was lost, and no token lost, repeated or changed."""
        return not self.differences and not self.endings.get(Ending.LOST)

    def as_json(self) -> dict[str, object]:
        """Return it as values of JSON."""
        recoveries = [fault.recovery for fault in self.faults if fault.recovery is not None]
        return {
            "is_whole": self.is_whole,
            "is_interrupted": self.is_interrupted,
            "num_requests": self.num_sent,
            **{f"num_{e.name.lower()}_requests": self.endings.get(e, 0) for e in Ending},
            "failures": dict(self.failures),
            "losses": dict(self.losses),
            "num_tokens": self.num_tokens,
            "num_lost_tokens": self.differences.num_lost,
            "num_repeated_tokens": self.differences.num_repeated,
            "num_changed_tokens": self.differences.num_changed,
            "faults": [{**asdict(fault), "kind": fault.kind.value} for fault in self.faults],
            "skipped_faults": dict(self.skipped),
            "num_instance_losses": _increase(self.before.num_losses, self.after.num_losses),
            "num_instance_joins": _increase(self.before.num_joins, self.after.num_joins),
            "num_engine_losses": _increase(self.before.num_engine_losses, self.after.num_engine_losses),
            "num_taken_over_requests": _increase(self.before.num_taken_over, self.after.num_taken_over),
            "longest_recovery": max(recoveries, default=None),
            "server_before": asdict(self.before),
            "server_after": asdict(self.after),
            "health": self.health,
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table."""
        yield from _line("requests", f"{self.num_sent:,} sent, {self._endings()}")
        for reason, count in (*self.losses.items(), *self.failures.items()):
            yield from _line("", f"{count:,} x {reason}")
        found = self.differences
        yield from _line(
            "tokens",
            f"{self.num_tokens:,} received; {found.num_lost:,} lost, {found.num_repeated:,} repeated, "
            f"{found.num_changed:,} changed",
        )
        yield from _line("faults", self._faults())
        for reason, count in self.skipped.items():
            yield from _line("", f"{count:,} skipped: {reason}")
        lost, joined = (
            _increase(getattr(self.before, name), getattr(self.after, name))
            for name in ("num_losses", "num_joins")
        )
        yield from _line("instances", f"{_or_unknown(lost)} lost, {_or_unknown(joined)} joined again")
        if (engines := _increase(self.before.num_engine_losses, self.after.num_engine_losses)) is not None:
            taken_over = _increase(self.before.num_taken_over, self.after.num_taken_over)
            yield from _line(
                "engines", f"{engines:,} lost, {_or_unknown(taken_over)} requests went on elsewhere"
            )
        yield from _line("recovery", self._recovery())
        memory = [
            _or_unknown(None if n is None else f"{n / 2**20:,.1f} MiB")
            for n in (self.before.num_memory_bytes, self.after.num_memory_bytes)
        ]
        yield from _line("server's memory", f"{memory[0]}, then {memory[1]}")
        descriptors = [_or_unknown(totals.num_descriptors) for totals in (self.before, self.after)]
        yield from _line("its descriptors", f"{descriptors[0]}, then {descriptors[1]}")
        yield from _line("health at the end", self.health)

    def _endings(self) -> str:
        named = [f"{self.endings.get(ending, 0):,} {ending.value}" for ending in Ending]
        return ", ".join(named if self.endings.get(Ending.CUT_OFF) else named[:-1])

    def _faults(self) -> str:
        counts = Counter(fault.kind for fault in self.faults)
        return ", ".join(f"{counts[kind]:,} x {kind.value}" for kind in counts) or "none"

    def _recovery(self) -> str:
        found = [fault.recovery for fault in self.faults if fault.recovery is not None]
        if not found:
            return "no stream was open at a fault"
        return (
            f"next token of open streams after {median(found):.2f} s (median), {max(found):.2f} s (longest)"
        )


def judged(
    expected: Sequence[Sequence[TokenId]], records: Sequence[StreamRecord]
) -> tuple[Differences, Counter[Ending]]:
    """Return all differences from the expected outputs, and how many streams ended in each way."""
    total = Differences()
    endings: Counter[Ending] = Counter()
    for record in records:
        assert record.ending is not None, "all have ended"
        is_complete = record.ending is Ending.COMPLETE
        total += differences(expected[record.prompt_index], record.token_ids, is_complete=is_complete)
        endings[record.ending] += 1
    return total, endings


def with_recovery(fault: Fault, records: Sequence[StreamRecord]) -> Fault:
    """Return a fault with the longest wait of the streams that were open, with a token, when it was injected.

    A wait that the fault causes begins before it or soon after it: tokens may have been on their way.
    """
    at = fault.injected_at
    waits = []
    for record in records:
        times = record.token_times
        if times and times[0] <= at < times[-1]:
            pairs = itertools.pairwise(times)
            waits.append(max(b - max(a, at) for a, b in pairs if a <= at + EFFECT_SECONDS and b > at))
    return replace(fault, recovery=max(waits, default=None), num_streams=len(waits))


def _line(heading: str, text: str) -> Iterator[str]:
    yield f"{heading:<{_WIDTH}} {text}"


def _increase(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _or_unknown(value: object | None) -> str:
    return "unknown" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
