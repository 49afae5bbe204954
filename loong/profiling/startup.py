"""The calibration of a server on processors: a few seconds of batches before the first request."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from math import log
from statistics import median
from time import monotonic

from loong.core.instance import ElasticInstance, InstanceKind
from loong.profiling.measure import Profiler
from loong.profiling.profiled_cluster import ProfiledCluster, TimedExecutor
from loong.profiling.scenarios import LEAST_ROOM, Limits
from loong.scheduler.cost.calibration import mean_error
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.cost.fit import NAMES, BatchSample, fit

logger = logging.getLogger(__name__)

_LIMITS = Limits(max_decode_requests=16, max_step_seconds=0.1, max_prompt_seconds=0.2)
_LEAST_SAMPLES = 60  # enough to determine all coefficients
_DETERMINED_BY_FEW = (
    "step",
    "weights",
    "token",
    "member",
)  # the fixed time of a step, and that of each token
_MEASURING_SHARE = 0.85  # of the time; the fit takes the remainder


async def calibrate(
    prior: WorkCostModel,
    instances: Sequence[ElasticInstance],
    executor: TimedExecutor,
    seconds: float,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> tuple[WorkCostModel, int]:
    """Run batches of every kind for about `seconds`, and fit `prior` to their times.

    Few batches, as of a busy or slow machine, scale it, and fit only the times of a step and a token. Nothing
    is measured if there is no time or too little room. Returns the model, and the id of the last batch, since
    workers take no id twice.
    """
    room = min(instance.kv_capacity for instance in instances if instance.kind is InstanceKind.FULL)
    if seconds == 0 or room < LEAST_ROOM:
        return prior, 0
    start, cluster = monotonic(), ProfiledCluster(instances, executor, prior.host.idle)
    longest = 1.25 * prior.host.idle  # a pause is no longer than it takes to count as idle
    profiler = Profiler(cluster, _LIMITS, prior, pause=lambda length: pause(min(length, longest)))
    samples = await profiler.sample(seconds * _MEASURING_SHARE)
    scaled = prior.scaled(median(each.seconds / each.predicted(prior) for each in samples))
    few = [name for name in _DETERMINED_BY_FEW if getattr(prior.coefficients, name)]
    names = NAMES if len(samples) >= _LEAST_SAMPLES else few
    found = (await asyncio.to_thread(fit, scaled, samples, names)).model
    if found.coefficients.token == 0:  # a step would have room for any number of tokens
        found = scaled
    logger.info(
        "calibrated the cost model by %d batches in %.1f s: predictions are off by %s instead of %s",
        len(samples),
        monotonic() - start,
        _errors(found, samples),
        _errors(prior, samples),
    )
    return found, cluster.last_id


def _errors(model: WorkCostModel, samples: Sequence[BatchSample]) -> str:
    """Return the mean error of each phase, as the dashboard shows it."""
    distances: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        phase = sample.steps[0][0].phase.value
        distances[phase].append(abs(log(sample.predicted(model) / sample.seconds)))
    return ", ".join(f"{mean_error(distances[phase]):.0%} ({phase})" for phase in sorted(distances))
