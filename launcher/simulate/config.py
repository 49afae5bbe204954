"""What `loong simulate` was asked to do, checked."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from math import inf
from pathlib import Path

from loong.core.errors import ConfigError
from loong.launcher.runs.run import check_classes
from loong.launcher.runs.run_logs import LogFiles
from loong.launcher.simulate.cluster import Hardware
from loong.scheduler.config import PolicyConfig
from loong.workloads.metrics.slo import SLORule
from loong.workloads.request import WorkloadRequest
from loong.workloads.workload import endless_workload

CLASS_REQUESTS = 400  # of a run that is judged by length class: the same ones at every rate
MIN_REQUESTS = 200  # of a run of a duration: with fewer, 90 % is within the noise
DEFAULT_DURATION = 300.0


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent: the requests that are measured, and others after them that keep the cluster as busy."""

    measured: Sequence[WorkloadRequest]
    following: Iterable[WorkloadRequest] = ()


@dataclass(frozen=True, slots=True)
class SimulatedLoadConfig:
    """What is sent, but for its rate. Measured are `num_requests` and nothing is sent after them, or (None)
    what arrives in `duration` seconds, at least `MIN_REQUESTS`, and the load goes on; of a file, what it has.

    `burstiness` None is what the workload says, and 1 if it says nothing.
    """

    workload: str
    seed: int = 0
    num_requests: int | None = None
    duration: float = DEFAULT_DURATION
    burstiness: float | None = None
    length_scale: float = 1.0
    output_scale: float | None = None

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed} is below 0")

    def at(self, rate: float) -> Load:
        """The load at `rate` requests a second."""
        requests = endless_workload(
            self.workload,
            seed=self.seed,
            request_rate=rate,
            burstiness=self.burstiness,
            length_scale=self.length_scale,
            output_scale=self.output_scale,
        )
        if self.num_requests is not None:
            return Load(tuple(islice(requests, self.num_requests)))
        measured: list[WorkloadRequest] = []
        for request in requests:
            if request.arrival_time >= self.duration and len(measured) >= MIN_REQUESTS:
                return Load(measured, chain((request,), requests))
            measured.append(request)
        return Load(measured)


@dataclass(frozen=True, slots=True)
class Host:
    """What slows a simulated cluster down beside its devices.

    Instances on CPUs share `num_cores`, and what an event leads to starts `plan_time` seconds after it.
    Batches take longer or shorter than predicted: `noise` is the standard deviation of the logarithm of how
    many times as long.
    """

    num_cores: float = inf
    plan_time: float = 0.0
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulateConfig:
    """One `loong simulate`: every policy under every rule, at `rates` or (`precision`) in search of goodput.

    A run attains if the share `goal` of its requests meet the rule; or, `is_per_class`, of those of every
    length class, and its backlog is stable. `precision` is how far apart, relative to
    the lower, the last rate that attains and the first that does not may be.
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
        """Whether each policy runs once a rule, so that runs can be shown one by one."""
        return self.precision is None and len(self.rates) == 1
