"""How long before its end the end of a batch is predicted, so that the next one is there when it ends."""

from dataclasses import dataclass

from loong.core.events import BatchEndPredicted
from loong.core.plan import BatchPlan


@dataclass(frozen=True, slots=True)
class LookaheadMargin:
    """Seconds for which a batch is planned, told and laid out: `batch` and, for each request, `request`.

    It is more than these take, for what an engine sees of an end is later than that: tokens are read and told
    first. Who comes meanwhile waits for a step more. `docs/performance.md` has what was measured.
    """

    batch: float = 4e-3
    request: float = 130e-6

    def delay(self, plan: BatchPlan) -> float | None:
        """How long after its start the end of a batch is predicted; None if it is not.

        Of leases nobody knows after how many steps they end.
        """
        if plan.num_steps > 1 or plan.predicted_time is None:
            return None
        return max(0.0, plan.predicted_time - self.batch - self.request * len(plan.request_ids))

    def predict_end(self, batch_id: int, plan: BatchPlan, begins_at: float) -> BatchEndPredicted | None:
        """What is told of the end of a batch that begins at this time, if anything is."""
        delay = self.delay(plan)
        if delay is None:
            return None
        return BatchEndPredicted(begins_at + delay, batch_id, begins_at + (plan.predicted_time or 0.0))
