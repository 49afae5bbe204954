"""The calibration of a server on processors: a few seconds of batches before the first request."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from math import log
from time import monotonic

from loong.core.idle_tracker import IDLE_SECONDS
from loong.core.instance import ElasticInstance, InstanceKind
from loong.launcher.profile.measure import Profiler
from loong.launcher.profile.stage import Stage, TimedExecutor
from loong.launcher.profile.stories import LEAST_ROOM, Limits
from loong.scheduler.calibration import mean_error
from loong.scheduler.cost_model import WorkCostModel
from loong.scheduler.fit import BatchSample, fit

logger = logging.getLogger(__name__)

_LIMITS = Limits(max_decode_requests=16, max_step_seconds=0.1, max_prompt_seconds=0.2)
_MEASURING_SHARE = 0.85  # of the time; the rest is for the fit


async def calibrate(
    prior: WorkCostModel, instances: Sequence[ElasticInstance], executor: TimedExecutor, seconds: float
) -> tuple[WorkCostModel, int]:
    """Run batches of every kind for about `seconds`, and fit `prior` to what they take.

    Returns the fitted model, and the id of the last batch, since workers take no id twice. The model is
    `prior` if there is no time, too little room, or where no token would take time.
    """
    room = min(instance.kv_capacity for instance in instances if instance.kind is InstanceKind.FULL)
    if seconds == 0 or room < LEAST_ROOM:
        return prior, 0
    start, stage = monotonic(), Stage(instances, executor)
    profiler = Profiler(stage, _LIMITS, prior, pause=_pause)
    samples = await profiler.sample(seconds * _MEASURING_SHARE)
    found = (await asyncio.to_thread(fit, prior, samples)).model
    is_usable = found.coefficients.token > 0  # else a step would have room for any number of tokens
    logger.info(
        "calibrated the cost model by %d batches in %.1f s: predictions are off by %s instead of %s%s",
        len(samples),
        monotonic() - start,
        _errors(found, samples),
        _errors(prior, samples),
        "" if is_usable else ", but no token takes time, so it stays as it was",
    )
    return found if is_usable else prior, stage.last_id


async def _pause(seconds: float) -> None:
    """Pause as a profile does, but be idle no longer than it takes to count as idle."""
    await asyncio.sleep(min(seconds, 1.25 * IDLE_SECONDS))


def _errors(model: WorkCostModel, samples: Sequence[BatchSample]) -> str:
    """Return the mean error of each phase, as the dashboard shows it."""
    distances: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        phase = sample.steps[0][0].phase.value
        distances[phase].append(abs(log(sample.predicted(model) / sample.seconds)))
    return ", ".join(f"{mean_error(distances[phase]):.0%} ({phase})" for phase in sorted(distances))
