"""What a policy may ask about time."""

from collections.abc import Mapping
from typing import Protocol

from loong.core.placement import Placement
from loong.core.plan import BatchPlan
from loong.core.request import RequestId


class CostModel(Protocol):
    """Predicted seconds of the work of one model on one kind of instance."""

    def prefill_time(self, num_new_tokens: int, num_cached_tokens: int, dop: int) -> float:
        """One chunk of one request, alone on `dop` instances."""
        ...

    def step_time(self, batch: BatchPlan, placements: Mapping[RequestId, Placement]) -> float:
        """One step of a batch, given the KV before it."""
        ...

    def migration_time(self, num_tokens: int) -> float:
        """Moving the KV of `num_tokens` tokens from one instance to another."""
        ...
