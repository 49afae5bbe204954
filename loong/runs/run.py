"""One run of a benchmark or a simulation, and the results that both report."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf

from loong.core.errors import ConfigError
from loong.workloads.metrics.backlog import UsedCapacity
from loong.workloads.metrics.counters import ServerCounters
from loong.workloads.metrics.metrics import (
    MIN_CLASS_REQUESTS,
    Metrics,
    class_edges,
    every_class_attains,
    run_attains,
)
from loong.workloads.metrics.misses import Misses
from loong.workloads.metrics.result import JSON, backlog_json, metrics_json
from loong.workloads.metrics.slo import Judged, SLORule
from loong.workloads.report.pareto import Devices, SpeedRun
from loong.workloads.request import WorkloadRequest


@dataclass(frozen=True, slots=True)
class RunKey:
    """The parameters of a run: a policy, or a server by its name, a rule, and a rate in requests a second.

    A run attains if the share `goal` of its requests meet the rule. If `is_per_class`, this must hold for
    every length class, and the backlog must be stable. `repeat` counts runs that differ in nothing but their
    `seed`.
    """

    policy: str
    rule: SLORule
    rate: float
    goal: float = 0.9
    seed: int = 0
    repeat: int = 0
    is_per_class: bool = False


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """The result of a run. A run that was cut off does not attain, by an unknown margin.

    `used` is None where the work of a request is not known, and `devices` where those of the server are not.
    """

    asked: RunKey
    metrics: Metrics
    columns: dict[str, JSON]
    counters: ServerCounters
    is_cut_off: bool
    used: UsedCapacity | None
    devices: Devices | None

    @property
    def policy(self) -> str:
        """Return the policy that ran."""
        return self.asked.policy

    @property
    def rate(self) -> float:
        """Return the requests per second, as asked for."""
        return self.asked.rate

    @property
    def errors(self) -> list[str]:
        """Return the error of each request; "" if there was none."""
        errors = self.columns["errors"]
        assert isinstance(errors, list)
        return errors

    @property
    def attains(self) -> bool:
        """Return whether the run met its rule."""
        if self.is_cut_off:
            return False
        if self.asked.is_per_class:
            return self.is_stable is not False and every_class_attains(self.metrics, self.asked.goal)
        return run_attains(self.metrics, self.asked.rule, self.asked.goal)

    @property
    def is_stable(self) -> bool | None:
        """Return whether the backlog of work did not grow; None if that is not known."""
        return None if self.used is None else self.used.backlog.is_stable

    @property
    def speed(self) -> SpeedRun:
        """Return the run as a point of a Pareto curve."""
        tpot = self.metrics.latencies.tpot
        return SpeedRun(
            self.policy,
            self.rate,
            None if tpot is None else tpot["median"],
            self.metrics.output_throughput,
            self.devices,
        )

    def as_json(self) -> dict[str, JSON]:
        """Return the run as in `docs/benchmarking.md`, without the fields that only its kind has."""
        return {
            "policy": self.asked.policy,
            "slo": self.asked.rule.describe(),
            "request_rate": finite(self.asked.rate),
            "repeat": self.asked.repeat,
            "seed": self.asked.seed,
            "attains": self.attains,
            "is_cut_off": self.is_cut_off,
            "is_per_class": self.asked.is_per_class,
            "is_stable": self.is_stable,
            "capacity_share": None if self.used is None else self.used.share,
            "backlog": None if self.used is None else backlog_json(self.used.backlog),
            **metrics_json(self.metrics),
            **self.speed.as_json(),
            **self.counters.as_json(),
            **self.columns,
        }


def allowed_misses(requests: Sequence[WorkloadRequest], asked: RunKey, length_scale: float) -> Misses:
    """Return how many may miss before it is clear that the run does not attain; of means, all may."""
    if asked.rule.judged is Judged.MEAN:
        return Misses()
    if not asked.is_per_class:
        return Misses((_allowed(len(requests), asked.goal),))
    edges = class_edges(length_scale)
    counts = _class_counts(requests, edges)
    return Misses(
        tuple(_allowed(count, asked.goal) if count >= MIN_CLASS_REQUESTS else inf for count in counts), edges
    )


def check_classes(rules: Iterable[SLORule], requests: Sequence[WorkloadRequest], length_scale: float) -> None:
    """Raise `ConfigError` if such runs cannot be judged by length class."""
    for rule in rules:
        if rule.judged is Judged.MEAN:
            raise ConfigError(f"--per-class judges each request, and --slo {rule.name} the means of a run")
    counts = _class_counts(requests, class_edges(length_scale))
    if max(counts) < MIN_CLASS_REQUESTS:
        raise ConfigError(
            f"--per-class judges classes of at least {MIN_CLASS_REQUESTS} requests, and the largest has "
            f"{max(counts)}; give more --num-requests"
        )


def _class_counts(requests: Sequence[WorkloadRequest], edges: Sequence[float]) -> list[int]:
    counts = [0] * (len(edges) + 1)
    for request in requests:
        counts[bisect_right(edges, request.num_prompt_tokens)] += 1
    return counts


def _allowed(num_requests: int, goal: float) -> int:
    return num_requests - ceil(goal * num_requests)


def finite(value: float | None) -> JSON:
    """Return a number for JSON, which has none that is infinite."""
    return "inf" if value == inf else value
