"""The checked configuration of `loong simulate`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from math import inf
from pathlib import Path

from loong.core.errors import ConfigError
from loong.runs.run import check_classes
from loong.runs.run_logs import LogFiles
from loong.scheduler.config import PolicyConfig
from loong.simulation.cluster import Hardware
from loong.workloads.metrics.slo import SLORule
from loong.workloads.request import WorkloadRequest
from loong.workloads.workload import endless_workload

CLASS_REQUESTS = 400  # of a run that is judged by length class: the same ones at every rate
MIN_REQUESTS = 200  # of a run of a duration: with fewer, 90 % is within the noise
DEFAULT_DURATION = 300.0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are measured, and others after them that keep the cluster equally busy.

    Each declares at least `declared_tokens` as its most output tokens, however long its answer will be.
    """

    measured: Sequence[WorkloadRequest]
    following: Iterable[WorkloadRequest] = ()
    declared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SimulatedLoadConfig:
    """The load except for its rate.

    With `num_requests`, these are measured and nothing is sent after them. Without (None), the arrivals of
    `duration` seconds are measured, at least `MIN_REQUESTS`, and the load goes on; a file sends what it has.
    `burstiness` None is the workload's own, and 1 if it has none. Requests declare at least `declared_tokens`
    as their most.
    """

    workload: str
    seed: int = 0
    num_requests: int | None = None
    duration: float = DEFAULT_DURATION
    burstiness: float | None = None
    length_scale: float = 1.0
    output_scale: float | None = None
    declared_tokens: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed} is below 0")

    def at(self, rate: float) -> Load:
        """Return the load at `rate` requests a second."""
        requests = endless_workload(
            self.workload,
            seed=self.seed,
            request_rate=rate,
            burstiness=self.burstiness,
            length_scale=self.length_scale,
            output_scale=self.output_scale,
        )
        if self.num_requests is not None:
            return Load(tuple(islice(requests, self.num_requests)), (), self.declared_tokens)
        measured: list[WorkloadRequest] = []
        for request in requests:
            if request.arrival_time >= self.duration and len(measured) >= MIN_REQUESTS:
                return Load(measured, chain((request,), requests), self.declared_tokens)
            measured.append(request)
        return Load(measured, (), self.declared_tokens)


@dataclass(frozen=True, slots=True)
class Host:
    """Delays of a simulated cluster in addition to its devices' times.

    Instances on CPUs share `num_cores`, and what an event leads to starts `plan_time` seconds after it.
    `noise` varies the times of batches: it is the standard deviation of the logarithm of actual over
    predicted time.
    """

    num_cores: float = inf
    plan_time: float = 0.0
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulateConfig:
    """One `loong simulate`: every policy under every rule, at `rates` or (`precision`) in search of goodput.

    A run attains if the share `goal` of its requests meet the rule. If `is_per_class`, this must hold for
    every length class, and the backlog must be stable. `precision` bounds the gap between the last rate that
    attains and the first that does not, relative to the lower.
    """

    model: str
    policies: tuple[str, ...]
    rules: tuple[SLORule, ...]
    rates: tuple[float, ...]
    hardware: Hardware
    load: SimulatedLoadConfig
    precision: float | None = None
    goal: float = 0.9
    is_per_class: bool = False
    host: Host = field(default_factory=Host)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    num_jobs: int = 1
    output_dir: Path | None = None
    is_json_printed: bool = True
    chosen: tuple[str, ...] = ()  # sentences on what was asked for as `auto`
    logs: LogFiles = field(default_factory=LogFiles)
    keeps_prefixes: bool = True
    relays: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.goal <= 1:
            raise ConfigError(f"--attainment {self.goal * 100:g} is not above 0 and at most 100")
        if self.is_per_class:
            check_classes(self.rules, self.load.at(1.0).measured, self.load.length_scale)
        num_runs = len(self.policies) * len(self.rules) if self.is_single else 2
        for flag, path in (("--event-log", self.logs.events), ("--decision-log", self.logs.decisions)):
            if path is not None and num_runs > 1:
                raise ConfigError(f"{flag} {path} is of one run; simulate one policy, one rule and one rate")

    @property
    def is_single(self) -> bool:
        """Return whether each policy runs once a rule, so that runs can be shown one by one."""
        return self.precision is None and len(self.rates) == 1
