"""Times of several trials: of losses and joins in a decision log, and a table of all."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from loong.observability.decision_log.lines import (
    BatchStartedLine,
    InstanceJoinedLine,
    InstanceLostLine,
    PlannedLine,
    StartedLine,
)
from loong.observability.decision_log.reader import read_log


class History:
    """The losses, joins and batches of a decision log, at Unix times."""

    def __init__(self, log: Path) -> None:
        lines = read_log(log)
        first = lines[0]
        assert isinstance(first, StartedLine)
        assert first.clock_start is not None
        self._lines, self._start = lines, first.clock_start
        planned = (batch for line in lines if isinstance(line, PlannedLine) for batch in line.batches)
        self._members = {batch.batch_id: batch.instance_ids for batch in planned}

    def after(self, time: float) -> tuple[float | None, float, float]:
        """Return the seconds from a time to the first loss (None: none), the join, and its first batch."""
        lost: float | None = None
        joined: InstanceJoinedLine | None = None
        for line in self._lines:
            match line:
                case InstanceLostLine() if joined is None and self._since(line, time) > 0:
                    lost = self._since(line, time)
                case InstanceJoinedLine() if joined is None and self._since(line, time) > 0:
                    joined = line
                case BatchStartedLine() if joined is not None:
                    if joined.instance_id in self._members[line.batch_id]:
                        return lost, self._since(joined, time), self._since(line, time)
                case _:
                    pass
        raise SystemExit("no instance has joined and had a batch")

    def _since(self, line: InstanceLostLine | InstanceJoinedLine | BatchStartedLine, time: float) -> float:
        return self._start + line.time - time


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds, or shares, of several trials."""

    what: str
    values: Sequence[float]


def print_table(rows: Iterable[Row]) -> None:
    print(f"{'':<36} trials   median  longest")
    for row in rows:
        print(f"{row.what:<36} {len(row.values):>6} {median(row.values):>8.3f} {max(row.values):>8.3f}")
