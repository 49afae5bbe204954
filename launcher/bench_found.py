"""What a benchmark has found so far."""

from collections.abc import Sequence
from dataclasses import dataclass

from loong.core.timeline import ClusterHistory
from loong.launcher.bench_config import Server
from loong.launcher.goodput import Goodput
from loong.launcher.measured_server import PrefillProbe
from loong.launcher.runs import Run


@dataclass(frozen=True, slots=True)
class MeasuredRun(Run):
    """A run, what it ran on, and what that did, if it told and the run is to be drawn.

    `share_of_others` is of this machine's processors, None if the server is not ours: it is among the others.
    """

    server: Server
    history: ClusterHistory | None
    share_of_others: float | None


@dataclass(frozen=True, slots=True)
class Repeats:
    """The repeated runs of a server at a rate; it attains where most of them do."""

    rate: float
    runs: tuple[Run, ...]

    @property
    def attains(self) -> bool:
        """Whether more than half of the runs attain."""
        return 2 * sum(run.attains for run in self.runs) > len(self.runs)


@dataclass(frozen=True, slots=True)
class Found:
    """What a benchmark found in so many seconds."""

    runs: Sequence[MeasuredRun]
    goodputs: Sequence[Goodput[Repeats]]
    probe: PrefillProbe | None
    wall_seconds: float


def by_policy(runs: Sequence[MeasuredRun]) -> dict[str, list[MeasuredRun]]:
    """Return the runs of each policy or server, in their order."""
    names = dict.fromkeys(run.policy for run in runs)
    return {name: [run for run in runs if run.policy == name] for name in names}
