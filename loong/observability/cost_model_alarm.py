"""Warns when batch times keep differing from the predictions that plans use."""

import logging
from math import inf
from pathlib import Path

from loong.core.applied import Applied
from loong.core.events import BatchFinished, Event
from loong.core.observer import Observer
from loong.core.plan import Transfer
from loong.scheduler.cost.calibration import Correction, Kind, mean_error
from loong.scheduler.cost.recalibration import Recalibration

logger = logging.getLogger(__name__)

LARGEST_ERROR = 1.0  # twice or half as long as predicted, in the mean of a full window
NOTABLE_FACTOR = 1.25  # either way; nearer to 1 the errors are scatter, which no cost model corrects
INTERVAL_SECONDS = 60.0  # between two warnings
_TRAVELING = {None: "", Transfer.QUERY: " in which queries travel", Transfer.KV: " in which KV travels"}


class CostModelAlarm(Observer):
    """An observer of the loop that comes after `recalibration`, whose errors it watches.

    `cost_model` is the file that plans began with; None for the device's roofline.
    """

    def __init__(self, recalibration: Recalibration, cost_model: Path | None) -> None:
        self._recalibration = recalibration
        self._remedy = _remedy(cost_model)
        self._warned_at = -inf

    def on_event(self, event: Event, _applied: Applied, /) -> None:
        """Warn if a kind of batch is far off, unless there was a warning a moment ago."""
        if not isinstance(event, BatchFinished) or event.time - self._warned_at < INTERVAL_SECONDS:
            return
        if findings := self._findings():
            self._warned_at = event.time
            logger.warning(
                "the cost model is wrong, and targets may be missed: %s; %s",
                "; ".join(findings),
                self._remedy,
            )

    def _findings(self) -> list[str]:
        """Return a phrase for each kind of batch that is too far off."""
        recalibration = self._recalibration
        settled = (
            (kind, correction, mean_error(correction.distances(is_applied=recalibration.is_applied)))
            for kind, correction in recalibration.calibration.corrections.items()
            if correction.is_settled
        )
        return [
            f"{_name(kind)} take {_slower(correction)} as it says, and "
            f"what plans count on is off by a factor of {1 + error:.2g} in the mean"
            for kind, correction, error in settled
            if error > LARGEST_ERROR and _is_notable(correction)
        ]


def _remedy(cost_model: Path | None) -> str:
    if cost_model is None:
        return "measure this machine by `loong profile --output FILE` and serve with `--cost-model FILE`"
    return (
        f"{cost_model} was measured on another machine, or while something else ran: measure again by "
        f"`loong profile --output {cost_model}` while this machine is idle"
    )


def _is_notable(correction: Correction) -> bool:
    return correction.delay > 0 or not 1 / NOTABLE_FACTOR < correction.factor < NOTABLE_FACTOR


def _name(kind: Kind) -> str:
    waiting = ", and holders compute meanwhile," if kind.waits else ""
    return f"{kind.phase.value} batches{_TRAVELING[kind.transfer]}{waiting}"


def _slower(correction: Correction) -> str:
    if correction.delay:
        return f"{1e3 * correction.delay:.0f} ms more and then as long"
    return f"{correction.factor:.2g} times as long"
