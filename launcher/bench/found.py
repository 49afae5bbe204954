"""The findings of a benchmark so far."""

from collections.abc import Sequence
from dataclasses import dataclass

from loong.core.cluster_history import ClusterHistory
from loong.launcher.bench.config import BenchConfig, Server
from loong.launcher.bench.measured_server import PrefillProbe
from loong.runs.goodput import Goodput
from loong.runs.run import PolicyRun


@dataclass(frozen=True, slots=True)
class MeasuredRun(PolicyRun):
    """A run, its server, and the server's history if the server reported it and the run is to be drawn.

    `share_of_others` is of this machine's processors. It is None if the server was not started here, since
    then the server is among the others.
    """

    server: Server
    history: ClusterHistory | None
    share_of_others: float | None
    num_unfinished: int = 0  # requests of an interrupted run, which is of the others alone

    @property
    def attains(self) -> bool:
        """Return whether the run met its rule and was not interrupted."""
        return not self.num_unfinished and PolicyRun.attains.__get__(self)


@dataclass(frozen=True, slots=True)
class Repeats:
    """The repeated runs of a server at a rate; it attains where most of them do."""

    rate: float
    runs: tuple[PolicyRun, ...]

    @property
    def attains(self) -> bool:
        """Return whether more than half of the runs attain."""
        return 2 * sum(run.attains for run in self.runs) > len(self.runs)


@dataclass(frozen=True, slots=True)
class BenchFindings:
    """The findings of a benchmark that took `wall_seconds`."""

    runs: Sequence[MeasuredRun]
    goodputs: Sequence[Goodput[Repeats]]
    probe: PrefillProbe | None
    wall_seconds: float


def missing_runs(found: BenchFindings, config: BenchConfig) -> list[str]:
    """Return the runs that were asked for and not made to their end, or the servers without a goodput."""
    if config.precision is not None:
        searched = {goodput.policy for goodput in found.goodputs}
        return [name for name in config.servers if name not in searched]
    ended = {(run.policy, run.rate, run.asked.repeat) for run in found.runs if not run.num_unfinished}
    many_rates, many_repeats = len(config.load.rates) > 1, config.num_repeats > 1
    return [
        name
        + (f" at {rate:g} req/s" if many_rates else "")
        + (f", repetition {repeat + 1}" if many_repeats else "")
        for name in config.servers
        for rate in config.load.rates
        for repeat in range(config.num_repeats)
        if (name, rate, repeat) not in ended
    ]


def by_policy(runs: Sequence[MeasuredRun]) -> dict[str, list[MeasuredRun]]:
    """Return the runs of each policy or server, in their order."""
    names = dict.fromkeys(run.policy for run in runs)
    return {name: [run for run in runs if run.policy == name] for name in names}
