"""The lookahead margin: how long before a batch's predicted end the next one is planned."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from loong.core.cost.cost_model import HostTimes
from loong.core.events import BatchEndPredicted
from loong.core.plan import BatchPlan


@dataclass(frozen=True, slots=True)
class LookaheadMargin:
    """Seconds to plan, send and prepare a batch: `batch`, and for each request `request`.

    The margin is larger than the work itself, because an engine sees the end of a batch only after tokens
    were read and sent. A request that arrives within the margin waits for one more step.
    """

    batch: float
    request: float

    @classmethod
    def on(cls, host: HostTimes) -> "LookaheadMargin":
        """Return the margin where the engine and the workers take the times of `host`."""
        return cls(host.lookahead_batch, host.lookahead_request)

    def delay(self, plan: BatchPlan) -> float | None:
        """Return the seconds after its start at which a batch's end is predicted; None if it is not.

        The end of a lease is not predicted, since its number of steps is open.
        """
        if plan.num_steps > 1 or plan.predicted_time is None:
            return None
        return max(0.0, plan.predicted_time - self.batch - self.request * len(plan.request_ids))

    def predict_end(self, batch_id: int, plan: BatchPlan, begins_at: float) -> BatchEndPredicted | None:
        """Return the event that predicts the end of a batch that begins at this time; None if none is."""
        delay = self.delay(plan)
        if delay is None:
            return None
        return BatchEndPredicted(begins_at + delay, batch_id, begins_at + (plan.predicted_time or 0.0))


class EndPredictions:
    """The batches in flight, and a timer for each that runs and whose end is to be predicted.

    `predict` takes each prediction in time. Without `lookahead` there is none.
    """

    def __init__(
        self, lookahead: LookaheadMargin | None, predict: Callable[[BatchEndPredicted], None]
    ) -> None:
        self._lookahead, self._predict = lookahead, predict
        self._plans: dict[int, BatchPlan] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def open(self, batch_id: int, plan: BatchPlan) -> None:
        """Note a batch that will begin."""
        self._plans[batch_id] = plan

    def begin(self, batch_id: int, now: float) -> None:
        """Set the timer of a batch that begins now."""
        if self._lookahead is None:
            return
        if (end := self._lookahead.predict_end(batch_id, self._plans[batch_id], now)) is not None:
            loop = asyncio.get_running_loop()
            self._timers[batch_id] = loop.call_later(end.time - now, self._predict, end)

    def close(self, batch_id: int) -> None:
        """Forget a batch that has ended."""
        del self._plans[batch_id]
        if (timer := self._timers.pop(batch_id, None)) is not None:
            timer.cancel()
