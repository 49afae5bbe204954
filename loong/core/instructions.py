"""What an executor is told to do. `ClusterState` makes these; nothing else does."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from loong.core.events import ProducedToken
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId, OwnerId, Placement
from loong.core.plan import BatchPlan, KVMigration
from loong.core.prompt_logprobs import ScoredChunk
from loong.core.request import RequestId, SamplingParams, TokenId


class Sibling(NamedTuple):
    """A request that begins with the KV of another's prompt, in the same slots, but draws its own token."""

    request_id: RequestId
    sampling_params: SamplingParams


class RequestInput(NamedTuple):
    """What workers need of one request of a batch, and do not know yet.

    `token_ids` are those of the batch's positions of this request, ascending. `placement` is the KV that
    exists before the batch. `sampling_params` is None where the batch does not reach the last known token, so
    that nothing is sampled. `prompt_token_ids` are given only if there is a repetition penalty, and
    `output_token_ids` only if the draw needs them. `siblings` begin when the batch ends, with all KV that the
    request then has. `depends_on_batch_id` is the batch before, which is to sample the newest token, if
    nobody knew it yet when this was submitted: `num_output_tokens` counts it, but no ids hold it. The same
    instance samples it, in a step that is neither of a lease nor the end of a prompt with siblings.
    """

    request_id: RequestId
    token_ids: Sequence[TokenId]
    num_prompt_tokens: int
    num_output_tokens: int
    placement: Placement
    sampling_params: SamplingParams | None
    prompt_token_ids: Sequence[TokenId] = ()
    output_token_ids: Sequence[TokenId] = ()
    siblings: tuple[Sibling, ...] = ()
    depends_on_batch_id: int | None = None

    def with_token(self, token: ProducedToken) -> "RequestInput":
        """The same, now that `token` is known; if the request ended with it, it ends with one more."""
        params = self.sampling_params
        assert params is not None, "the token before the one to be sampled is its newest"
        if token.finish_reason is not None:
            params = replace(params, max_tokens=self.num_output_tokens + 1, min_tokens=0)
        return self._replace(
            token_ids=(*self.token_ids, token.token_id),
            sampling_params=params,
            output_token_ids=(*self.output_token_ids, token.token_id) if params.needs_output else (),
            depends_on_batch_id=None,
        )

    @property
    def last_stop(self) -> int:
        """One more than the last position whose KV is made, if the request ends at its declared maximum."""
        assert self.sampling_params is not None, "it is sampled"
        return self.num_prompt_tokens + self.sampling_params.max_tokens - 1

    @property
    def is_decoding(self) -> bool:
        """Whether its one newest token is computed, as of a `RequestView` that is decoding."""
        num_known_tokens = self.num_prompt_tokens + self.num_output_tokens
        return self.num_output_tokens > 0 and num_known_tokens - self.placement.num_tokens == 1


@dataclass(frozen=True, slots=True)
class RunBatch:
    """Every instance of the plan's group carries out its part, and the holders outside it serve."""

    batch_id: int
    plan: BatchPlan
    inputs: tuple[RequestInput, ...]

    @property
    def holder_ids(self) -> tuple[InstanceId, ...]:
        """The instances outside the group that hold KV which the batch reads or makes, ascending."""
        return self.plan.holder_ids([given.placement for given in self.inputs])

    @property
    def participant_ids(self) -> tuple[InstanceId, ...]:
        """All instances that have a part in it: members, then holders."""
        return (*self.plan.group.instance_ids, *self.holder_ids)

    def lengthened(self, num_steps: int) -> "RunBatch":
        """The same lease with so many steps, as if none of its requests ended by a token."""
        stops = {given.request_id: given.last_stop for given in self.inputs}
        return RunBatch(self.batch_id, self.plan.lengthened(num_steps, stops), self.inputs)


@dataclass(frozen=True, slots=True)
class RunScoredBatch(RunBatch):
    """A batch of one step in which log probabilities of prompts are found too.

    It is a message of its own, so that other batches carry no trace of it.
    """

    scored: tuple[ScoredChunk, ...] = ()


@dataclass(frozen=True, slots=True)
class ExtendLease:
    """The lease may go on up to `num_steps` steps, if the group's leader hears of it before it ends."""

    batch_id: int
    group: ESPGroup
    num_steps: int


@dataclass(frozen=True, slots=True)
class StopLease:
    """The group's leader ends the lease before `step`, or at the next step boundary it can."""

    batch_id: int
    group: ESPGroup
    step: int


@dataclass(frozen=True, slots=True)
class MoveKV:
    """The two ends of a migration copy it into reserved slots. Once both are done, `ReleaseKV` commits it
    (the source's slots go) or rolls it back (the destination's)."""

    migration_id: int
    migration: KVMigration


@dataclass(frozen=True, slots=True)
class ReleaseKV:
    """These instances free an owner's slots: of the positions given, or (None) all."""

    owner_id: OwnerId
    instance_ids: tuple[InstanceId, ...]
    positions: range | None = None


Instruction: TypeAlias = RunBatch | ExtendLease | StopLease | MoveKV | ReleaseKV
