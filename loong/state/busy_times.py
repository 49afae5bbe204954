"""The seconds in which batches ran, and in which two groups computed prompts at once."""

from loong.core.plan import BatchPlan


class BusyTimes:
    """The times of batches from their starts and ends, which come in the order of events."""

    def __init__(self) -> None:
        self.busy = 0.0  # seconds with a batch
        self.two_prompt_groups = 0.0  # seconds with two batches of prompts, each on several instances
        self._is_prompt_group: dict[int, bool] = {}  # of the batches that run
        self._since = 0.0

    def start(self, batch_id: int, plan: BatchPlan, time: float) -> None:
        """Note that a batch runs."""
        self._advance(time)
        computes_prompt = any(len(block.positions) > 1 for block in plan.queries)
        self._is_prompt_group[batch_id] = plan.group.dop > 1 and computes_prompt

    def end(self, batch_id: int, time: float) -> None:
        """Note that a batch runs no more, if it did."""
        self._advance(time)
        self._is_prompt_group.pop(batch_id, None)

    def _advance(self, time: float) -> None:
        elapsed, self._since = max(0.0, time - self._since), max(time, self._since)
        if self._is_prompt_group:
            self.busy += elapsed
        if sum(self._is_prompt_group.values()) > 1:
            self.two_prompt_groups += elapsed
