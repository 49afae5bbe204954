"""The lookahead margin: how long before a batch's predicted end the next one is planned."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from loong.core.cost.cost_model import HostTimes
from loong.core.events import BatchEndPredicted
from loong.core.plan import BatchPlan
from loong.executor.in_flight import SubmittedBatch

SENDING_SHARE = 0.5  # of the margin of a batch: to send and prepare it, after planning
NUM_PLANS = 32  # the last ones, whose times count
SLOW_SHARE = 0.9  # of these plans take less than the time that is allowed for


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

    def delay(self, plan: BatchPlan, planning: float = 0.0) -> float | None:
        """Return the seconds after its start at which a batch's end is predicted; None if it is not.

        If plans take `planning` seconds, the margin has room for that. The end of a lease is not predicted,
        since its number of steps is open.
        """
        if plan.num_steps > 1 or plan.predicted_time is None:
            return None
        usual = self.batch + self.request * len(plan.request_ids)
        return max(0.0, plan.predicted_time - max(usual, planning + SENDING_SHARE * self.batch))

    def predict_end(
        self, batch_id: int, plan: BatchPlan, begins_at: float, planning: float = 0.0
    ) -> BatchEndPredicted | None:
        """Return the event that predicts the end of a batch that begins at this time; None if none is."""
        delay = self.delay(plan, planning)
        if delay is None:
            return None
        return BatchEndPredicted(begins_at + delay, batch_id, begins_at + (plan.predicted_time or 0.0))


class PlanningTimes:
    """The seconds from predicted ends until batches are planned for them."""

    def __init__(self) -> None:
        self._last = deque[float](maxlen=NUM_PLANS)
        self._since: float | None = None  # an end was predicted for which nothing was planned yet

    @property
    def slow(self) -> float:
        """Return the seconds within which most of the last plans were made; 0 if there are none."""
        return sorted(self._last)[int(SLOW_SHARE * len(self._last))] if self._last else 0.0

    def begin(self, now: float) -> None:
        """Note that an end is predicted, and a plan begins unless one is due already."""
        if self._since is None:
            self._since = now

    def take(self, now: float) -> None:
        """Note that a batch is planned, the first of its plan or another."""
        if self._since is not None:
            self._last.append(now - self._since)
        self._since = None

    def end(self) -> None:
        """Note that all events so far are planned for: later batches are planned for others."""
        self._since = None


class EndPredictions:
    """A timer for each batch that runs and whose end is to be predicted.

    `predict` takes each prediction in time. Without `lookahead` there is none.
    """

    def __init__(
        self, lookahead: LookaheadMargin | None, predict: Callable[[BatchEndPredicted], None]
    ) -> None:
        self._lookahead, self._predict = lookahead, predict
        self._planning = PlanningTimes()

    def begin(self, batch: SubmittedBatch, now: float) -> None:
        """Set the timer of a batch that begins now."""
        if self._lookahead is None:
            return
        plan = batch.instruction.plan
        end = self._lookahead.predict_end(batch.batch_id, plan, now, self._planning.slow)
        if end is not None:
            loop = asyncio.get_running_loop()
            batch.timer = loop.call_later(end.time - now, self._take, end)

    def close(self, batch: SubmittedBatch) -> None:
        """Predict nothing of a batch that has ended, or never will."""
        if batch.timer is not None:
            batch.timer.cancel()

    def take_plan(self, now: float) -> None:
        """Note that a batch is planned now. It may be sent later."""
        self._planning.take(now)

    def end_planning(self) -> None:
        """Note that all is planned for the ends that were predicted so far."""
        self._planning.end()

    def _take(self, end: BatchEndPredicted) -> None:
        self._planning.begin(end.time)
        self._predict(end)
