"""One run of a benchmark or a simulation: what both of them tell people and programs."""

from dataclasses import dataclass
from math import ceil, inf

from loong.workloads.counters import ServerCounters
from loong.workloads.metrics import Metrics, run_attains
from loong.workloads.result import JSON, metrics_json
from loong.workloads.slo import Judged, SLORule


@dataclass(frozen=True, slots=True)
class Asked:
    """What is run: a policy, or a server by its name, under a rule, at so many requests a second.

    A run attains if the share `goal` of its requests meet the rule. `repeat` counts runs that differ in
    nothing but their `seed`.
    """

    policy: str
    rule: SLORule
    rate: float
    goal: float = 0.9
    seed: int = 0
    repeat: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it. A run that was cut off does not attain, nobody knows by how much."""

    asked: Asked
    metrics: Metrics
    columns: dict[str, JSON]
    counters: ServerCounters
    is_cut_off: bool

    @property
    def policy(self) -> str:
        """Whose run it is."""
        return self.asked.policy

    @property
    def rate(self) -> float:
        """Requests per second, as asked for."""
        return self.asked.rate

    @property
    def errors(self) -> list[str]:
        """What went wrong with each request; "" if nothing did."""
        errors = self.columns["errors"]
        assert isinstance(errors, list)
        return errors

    @property
    def attains(self) -> bool:
        """Whether the run met its rule."""
        return not self.is_cut_off and run_attains(self.metrics, self.asked.rule, self.asked.goal)

    def as_json(self) -> dict[str, JSON]:
        """Return the run as in `docs/benchmarking.md`, but for what only its kind has."""
        return {
            "policy": self.asked.policy,
            "slo": self.asked.rule.describe(),
            "request_rate": finite(self.asked.rate),
            "repeat": self.asked.repeat,
            "seed": self.asked.seed,
            "attains": self.attains,
            "is_cut_off": self.is_cut_off,
            **metrics_json(self.metrics),
            **self.counters.as_json(),
            **self.columns,
        }


def max_misses_of(num_requests: int, asked: Asked) -> float:
    """How many requests may miss before it is clear that the run does not attain; of means, all may."""
    if asked.rule.judged is Judged.MEAN:
        return inf
    return num_requests - ceil(asked.goal * num_requests)


def finite(value: float | None) -> JSON:
    """A number as JSON, which has none that is infinite."""
    return "inf" if value == inf else value
