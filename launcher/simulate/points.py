"""Runs of a sweep: a point is one policy under one rule at one rate."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from typing import TypeVar

from tqdm import tqdm

import loong
from loong.core.snapshot import ClusterStats
from loong.core.timeline import BatchSlice, Timeline
from loong.launcher.run_logs import run_logs
from loong.launcher.simulate.config import SimulateConfig
from loong.launcher.simulate.run import simulate
from loong.recording.lines import VERSION, Setting
from loong.scheduler.policy import make_policy
from loong.workloads.metrics import Metrics, compute_metrics
from loong.workloads.slo import SLORule

ATTAINMENT = 0.9  # of P90 goodput

Task = TypeVar("Task")
Result = TypeVar("Result")


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
    load, cluster = config.load, config.hardware.cluster(point.policy)
    limits_of = point.rule.limits_of(config.hardware.unloaded_prefill())
    requests = load.at(point.rate)
    timeline = Timeline()
    setting = Setting(
        VERSION, loong.__version__, cluster.instances, point.policy, config.policy, cluster.cost_model
    )
    with run_logs(config.logs, setting) as observers:
        run = simulate(
            make_policy(point.policy, config.policy),
            cluster,
            requests,
            limits_of,
            host=config.host,
            observers=(timeline, *observers) if keeps_slices else observers,
            max_misses=len(requests) - ceil(ATTAINMENT * len(requests)) if cuts_off else inf,
        )
    metrics = compute_metrics(run.records, limits_of, length_scale=load.length_scale)
    return PointResult(point, metrics, run.stats, run.num_events, run.is_cut_off, tuple(timeline.slices))


def done(
    work: Callable[[Task], Result], tasks: Sequence[Task], num_jobs: int, unit: str
) -> Iterator[tuple[int, Result]]:
    """Do all tasks in so many processes, under a progress bar; yields (index, result) as they are done."""
    with tqdm(total=len(tasks), unit=unit, disable=None) as bar:
        for result in _done(work, tasks, min(num_jobs, len(tasks))):
            bar.update()
            yield result


def _done(
    work: Callable[[Task], Result], tasks: Sequence[Task], num_jobs: int
) -> Iterator[tuple[int, Result]]:
    if num_jobs <= 1:
        yield from ((index, work(task)) for index, task in enumerate(tasks))
        return
    with ProcessPoolExecutor(num_jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(work, task): index for index, task in enumerate(tasks)}
        for future in as_completed(futures):
            yield futures[future], future.result()


def in_order(work: Callable[[Task], Result], tasks: Sequence[Task], num_jobs: int, unit: str) -> list[Result]:
    """The results of `done`, in the order of tasks."""
    results = dict(done(work, tasks, num_jobs, unit))
    return [results[index] for index in range(len(tasks))]


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
