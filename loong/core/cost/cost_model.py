"""The questions about time that a policy may ask a cost model."""

from dataclasses import dataclass
from math import hypot, sqrt
from typing import Protocol

from loong.core.cost.work import InstanceWork, StepWork
from loong.core.placement import InstanceId
from loong.core.value import value


@value
class PrefillTerms:
    """Seconds of a prefill step at one DoP, in closed form, so that a planner can evaluate thousands.

    n new tokens on c cached ones take overhead + per_prompt + max(launch, hypot(floor, per_token n) +
    per_cached_pair n c + per_new_pair n^2); several prompts together take their number and the sums of n, n c
    and n^2.
    """

    overhead: float
    floor: float
    per_token: float
    per_cached_pair: float
    per_new_pair: float
    per_prompt: float = 0.0
    launch: float = 0.0

    @property
    def least(self) -> float:
        """Return the seconds of a step, however little is in it."""
        return self.overhead + max(self.launch, self.floor)

    def time(
        self, num_tokens: float, num_cached_pairs: float, num_new_pairs: float, num_prompts: int = 1
    ) -> float:
        """Return the seconds of a step, given the sums of n, n c and n^2."""
        computing = (
            hypot(self.floor, self.per_token * num_tokens)
            + self.per_cached_pair * num_cached_pairs
            + self.per_new_pair * num_new_pairs
        )
        return self.overhead + self.per_prompt * num_prompts + max(self.launch, computing)

    def max_tokens(self, seconds: float, num_cached: int) -> int:
        """Return the most tokens of one prompt that a step of `seconds` computes; 0 if not even one."""
        computing = seconds - self.overhead - self.per_prompt
        left = computing - self.floor
        if left <= 0 or computing < self.launch:
            return 0
        # hypot(floor, x) <= floor + x: never too many tokens, and only slightly too few once x exceeds the
        # floor.
        slope = self.per_token + self.per_cached_pair * num_cached
        root = sqrt(slope * slope + 4 * self.per_new_pair * left)
        return int(2 * left / (slope + root))


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Seconds that depend on the processors of the engine and the workers, not on what computes steps.

    Planning, checking and sending one request of a batch, twice, takes the engine `plan_request`. After
    `idle` seconds without work an instance starts its next batch slowly. The ends of batches are predicted
    earlier by `lookahead_batch` and, for each request, `lookahead_request`.
    """

    plan_request: float
    idle: float
    lookahead_batch: float
    lookahead_request: float


class CostModel(Protocol):
    """Predicted seconds of the work of one model on one kind of instance."""

    @property
    def host(self) -> HostTimes:
        """The times of the processors that run engine and workers."""
        ...

    def step_time(self, work: StepWork, /) -> float:
        """Return the seconds of one step of a batch: its overhead, and its busiest instance or holder."""
        ...

    def served_time(self, work: InstanceWork, /) -> float:
        """Return the seconds that an instance's own batch loses to `work` for a step of others.

        That step takes `seconds`.
        """
        ...

    def instance_time(self, work: InstanceWork, /) -> float:
        """Return the seconds of the part of a step that one instance computes by itself."""
        ...

    def prefill_terms(self, dop: int, /) -> PrefillTerms:
        """Return the terms of chunks striped over `dop` instances, with nothing else in the batch."""
        ...

    def migration_time(self, num_tokens: int, source_id: InstanceId, destination_id: InstanceId, /) -> float:
        """Return the seconds to move the KV of `num_tokens` tokens between instances or host tiers.

        Nothing else moves on these links meanwhile: several moves into one instance, or out of one, take
        about as long as one of all their tokens.
        """
        ...

    def copying_time(self, num_tokens: int, /) -> float:
        """Return the seconds that an instance's own batch loses to KV of `num_tokens` tokens that it moves.

        That is the KV that it reads for others, or stores from them.
        """
        ...


def prefill_time(cost_model: CostModel, num_new_tokens: int, num_cached_tokens: int, dop: int) -> float:
    """Return the seconds of one chunk of one request, alone on `dop` instances."""
    terms = cost_model.prefill_terms(dop)
    return terms.time(num_new_tokens, num_new_tokens * num_cached_tokens, num_new_tokens**2)
