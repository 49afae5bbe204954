"""Runs of a sweep: a point is one policy under one rule at one rate."""

from dataclasses import dataclass
from functools import partial
from math import ceil, inf

import loong
from loong.core.snapshot import ClusterStats
from loong.core.timeline import BatchSlice, Timeline
from loong.launcher.run_logs import run_logs
from loong.launcher.simulate.config import SimulateConfig
from loong.launcher.simulate.parallel import in_order
from loong.launcher.simulate.run import simulate
from loong.recording.lines import VERSION, Setting
from loong.scheduler.policy import make_policy
from loong.workloads.metrics import Metrics, compute_metrics
from loong.workloads.slo import SLORule

ATTAINMENT = 0.9  # of P90 goodput


@dataclass(frozen=True, slots=True)
class Point:
    """What is simulated; the rate is in requests a second."""

    policy: str
    rule: SLORule
    rate: float


@dataclass(frozen=True, slots=True)
class PointResult:
    """What came of a point. A run that was cut off attains less than `ATTAINMENT`, nobody knows how much.

    `slices` say what ran when, if that was kept.
    """

    point: Point
    metrics: Metrics
    stats: ClusterStats
    num_events: int
    is_cut_off: bool
    slices: tuple[BatchSlice, ...] = ()

    @property
    def attains(self) -> bool:
        """Whether enough requests met their SLO."""
        return not self.is_cut_off and (self.metrics.attainment or 0.0) >= ATTAINMENT


def run_point(
    config: SimulateConfig, point: Point, *, keeps_slices: bool = False, cuts_off: bool = False
) -> PointResult:
    """Simulate one point. `cuts_off` ends the run as soon as it is clear that it does not attain."""
    load, cluster = config.load.at(point.rate), config.hardware.cluster(point.policy)
    limits_of = point.rule.limits_of(config.hardware.unloaded_prefill())
    max_misses = len(load.measured) - ceil(ATTAINMENT * len(load.measured))
    timeline = Timeline()
    setting = Setting(
        VERSION, loong.__version__, cluster.instances, point.policy, config.policy, cluster.cost_model
    )
    with run_logs(config.logs, setting) as observers:
        run = simulate(
            make_policy(point.policy, config.policy),
            cluster,
            load,
            limits_of,
            host=config.host,
            observers=(timeline, *observers) if keeps_slices else observers,
            max_misses=max_misses if cuts_off else inf,
        )
    metrics = compute_metrics(run.records, limits_of, length_scale=config.load.length_scale)
    return PointResult(point, metrics, run.stats, run.num_events, run.is_cut_off, tuple(timeline.slices))


def sweep(config: SimulateConfig) -> list[PointResult]:
    """Every policy under every rule at every rate; what ran when is kept if it will be drawn."""
    points = [
        Point(policy, rule, rate)
        for rule in config.rules
        for policy in config.policies
        for rate in config.rates
    ]
    work = partial(run_point, config, keeps_slices=config.is_single and config.output_dir is not None)
    return in_order(work, points, config.num_jobs, "run")
