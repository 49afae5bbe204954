"""Runs scenarios in rounds, each scenario several times, and makes samples of their times."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from random import Random
from statistics import median
from time import monotonic

from loong.core.cost.cost_model import CostModel
from loong.core.cost.work import batch_work
from loong.core.instance import ESPGroup, InstanceKind
from loong.core.placement import Placement
from loong.core.plan import BatchPlan, IterationPlan
from loong.core.request import RequestId
from loong.profiling.profiled_cluster import ProfiledCluster
from loong.profiling.scenarios import BATCH_KINDS, KINDS, Limits, Scenario, ScenarioGenerator
from loong.scheduler.cost.fit import BatchSample, MigrationSample, Sample

NUM_REPEATS = 3  # enough for a median; more scenarios determine coefficients better than more repeats
PAUSE = 0.004  # seconds before a plan, as a server has some between plans
SHARE_IDLE = 0.25  # of the plans behind the first of a scenario
WARM_UP_SHARE = 0.2  # of the time for samples
HELD_OUT = 0.2  # of all scenarios


@dataclass(frozen=True, slots=True)
class Measured:
    """The sample of a plan that was carried out several times, with the median and the spread of its times.

    `spread` is how much longer, relative, the median took than the fastest. The samples of a scenario are all
    held out from the fit, or none is.
    """

    sample: Sample
    spread: float
    is_held_out: bool = False


@dataclass(frozen=True, slots=True)
class ProfileCase:
    """A scenario that can be generated again."""

    make: Callable[[ScenarioGenerator], Scenario]
    group: ESPGroup
    seed: int


class Profiler:
    """Measures groups of every size on one cluster."""

    def __init__(
        self,
        cluster: ProfiledCluster,
        limits: Limits,
        prior: CostModel,
        *,
        seed: int = 0,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._cluster, self._limits, self._prior = cluster, limits, prior
        self._pause = pause
        self._random = Random(seed)  # noqa: S311 - reproducible, guards nothing

    async def measure(self, duration: float, on_progress: Callable[[float], None]) -> list[Measured]:
        """Run scenarios for about `duration` seconds after a round that warms up; at least each one once."""
        for case in self._round():
            await self._report(case)
        start, scenarios, num_rounds = monotonic(), list[list[Measured]](), 0
        while num_rounds == 0 or (monotonic() - start) * (num_rounds + 1) / num_rounds < duration:
            scenarios += await self._measured_round(
                start + duration, lambda: on_progress(monotonic() - start)
            )
            num_rounds += 1
        return self._divided([scenario for scenario in scenarios if scenario])

    async def sample(self, duration: float) -> list[BatchSample]:
        """Run scenarios of batches, each once, for about `duration` seconds, after one that warms up.

        Short and long prompts come first. So even few batches determine how the time of a step depends on
        its tokens. Where steps are slow, they may take as long again.
        """
        end = self._cluster.now + duration
        await self._report(self._round(BATCH_KINDS)[-1], self._cluster.now + WARM_UP_SHARE * duration)
        contrast, *_ = self._round((ScenarioGenerator.contrast,))  # on one instance
        samples = await self._batches(contrast, end + duration)
        while self._cluster.now < end:
            cases = self._round(BATCH_KINDS)
            for case in self._random.sample(cases, len(cases)):
                samples += await self._batches(case, end)
        return samples

    async def _batches(self, case: ProfileCase, end: float) -> list[BatchSample]:
        """Run a scenario once, cut off at `end` but not before its first batch."""
        samples, _ = await self._report(case, end)
        return [sample for sample in samples if isinstance(sample, BatchSample)]

    def _round(self, kinds: Sequence[Callable[[ScenarioGenerator], Scenario]] = KINDS) -> list[ProfileCase]:
        """Return a scenario of each kind for each DoP, and where others serve, of decodes on one instance."""
        instances = self._cluster.snapshot().instances
        full = [i.instance_id for i in instances if i.kind is InstanceKind.FULL]
        dops = range(1, len(full) + 1)
        groups = (ESPGroup(tuple(self._random.sample(full, dop))) for dop in dops)
        cases = [
            ProfileCase(kind, group, self._random.getrandbits(32)) for group, kind in product(groups, kinds)
        ]
        decodes = (case for case in cases if case.make is ScenarioGenerator.decode)
        return cases + [replace(case, make=ScenarioGenerator.serve) for case in decodes if case.group.dop > 1]

    def _divided(self, scenarios: Sequence[Sequence[Measured]]) -> list[Measured]:
        """Return all samples, with a fixed share of the scenarios held out.

        Of several scenarios at least one is held out, and never all.
        """
        num_held_out = max(1, round(HELD_OUT * len(scenarios)))
        held_out = set(self._random.sample(range(len(scenarios)), num_held_out))
        return [
            replace(m, is_held_out=i in held_out) for i, scenario in enumerate(scenarios) for m in scenario
        ]

    async def _measured_round(self, end: float, on_scenario: Callable[[], None]) -> list[list[Measured]]:
        """Return the samples of new scenarios.

        Each runs equally often, until `end` but at least once, in an order that spreads a disturbance over
        all.
        """
        cases = self._round()
        times: dict[int, list[list[float]]] = defaultdict(list)
        samples: dict[int, list[Sample]] = {}
        for repeat in range(NUM_REPEATS):
            if repeat and monotonic() > end:
                break
            for index in self._random.sample(range(len(cases)), len(cases)):
                samples[index], seconds = await self._report(cases[index])
                times[index].append(seconds)
                on_scenario()
        return [
            [
                _measured(sample, repeats)
                for sample, repeats in zip(samples[index], zip(*times[index], strict=True), strict=True)
            ]
            for index in range(len(cases))
        ]

    async def _report(self, case: ProfileCase, end: float = inf) -> tuple[list[Sample], list[float]]:
        """Run a scenario once, cut off at `end`.

        Returns its plans as samples, by the clock of the workers if they have one, and their seconds by ours.
        """
        random = Random(case.seed)  # noqa: S311 - as above
        generator = ScenarioGenerator(self._cluster, case.group, self._limits, self._prior, random)
        samples: list[Sample] = []
        seconds: list[float] = []
        pauses = Random(case.seed)  # noqa: S311 - of their own, so that they change nothing of the scenario
        for plan in case.make(generator):
            if samples and self._cluster.now > end:
                break
            is_idle = not samples or pauses.random() < SHARE_IDLE
            # Before the first plan of a scenario, and before some others, instances are idle.
            await self._pause(2 * self._prior.host.idle if is_idle else PAUSE)
            sample = _sample(plan, self._cluster)
            seconds.append(await self._cluster.carry_out(plan))
            samples.append(replace(sample, seconds=self._cluster.batch_seconds or seconds[-1]))
        self._cluster.end_all()
        return samples, seconds


def _measured(sample: Sample, repeats: Sequence[float]) -> Measured:
    typical = median(repeats)
    return Measured(replace(sample, seconds=typical), spread=typical / min(repeats) - 1)


def _sample(plan: IterationPlan, cluster: ProfiledCluster) -> Sample:
    """Return a sample, without a time, of a plan of one batch or one migration that begins now."""
    if plan.batches:
        (batch,) = plan.batches
        return batch_sample(batch, cluster.placements(), starts_idle=cluster.starts_idle(batch.group))
    (migration,) = plan.migrations
    segment = migration.segment
    return MigrationSample(len(segment.positions), segment.instance_id, migration.destination_id, seconds=0.0)


def batch_sample(
    batch: BatchPlan,
    placements: Mapping[RequestId, Placement],
    num_steps: int = 0,
    *,
    starts_idle: bool,
) -> BatchSample:
    """Return the sample of a batch, given the KV before it and the steps a lease took (0: all it may)."""
    work = batch_work(batch, placements, num_steps or batch.num_steps, starts_idle=starts_idle)
    alone = tuple((replace(step, idle_holder_ids=frozenset(step.holders)), count) for step, count in work)
    return BatchSample(alone, seconds=0.0)
