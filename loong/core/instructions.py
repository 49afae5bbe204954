"""Instructions for an executor. Only `ClusterState` makes them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from loong.core.events import ProducedToken
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId, KVSegment, OwnerId, Placement
from loong.core.plan import BatchPlan, KVMigration
from loong.core.prompt_logprobs import ScoredChunk
from loong.core.request import RequestId, SamplingParams, TokenId


class Sibling(NamedTuple):
    """A request that begins with another's prompt, and samples separately. `ShareKV` gives it the KV."""

    request_id: RequestId
    sampling_params: SamplingParams


class RequestInput(NamedTuple):
    """The data of one request of a batch that workers do not have yet.

    `token_ids` are those from `first_position` to the batch's last position of this request. `placement` is
    the KV that exists before the batch. `sampling_params` is None where the batch does not reach the last
    known token, so that nothing is sampled. `prompt_token_ids` are given only if there is a repetition
    penalty, and
    `output_token_ids` only if sampling needs them. `siblings` begin when the batch ends, with all KV that the
    request then has.

    `depends_on_batch_id` is the previous batch, if it has yet to sample the request's newest token. Then
    `num_output_tokens` counts that token, but no ids hold it. The same instance samples it, in a step that is
    neither of a lease nor the end of a prompt with siblings.
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
        """Return the same input with `token` known; if the request ended with it, it ends with one more."""
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
    def first_position(self) -> int:
        """Return the first position of the batch, the lowest whose KV is missing."""
        return self.placement.first_missing

    @property
    def last_stop(self) -> int:
        """Return the position after the last one whose KV is made before the declared end."""
        assert self.sampling_params is not None, "it is sampled"
        return self.num_prompt_tokens + self.sampling_params.max_tokens - 1

    @property
    def is_decoding(self) -> bool:
        """Return whether only its newest token is computed, as for a `RequestView` that is decoding."""
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
        """Return the same lease with `num_steps` steps, as if no token ended its requests."""
        stops = {given.request_id: given.last_stop for given in self.inputs}
        return RunBatch(self.batch_id, self.plan.lengthened(num_steps, stops), self.inputs)


@dataclass(frozen=True, slots=True)
class RunScoredBatch(RunBatch):
    """A batch of one step that also computes log probabilities of prompts.

    It is a separate message, so that it adds nothing to other batches.
    """

    scored: tuple[ScoredChunk, ...] = ()


@dataclass(frozen=True, slots=True)
class ExtendLease:
    """The lease may go on up to `num_steps` steps, if the group's leader receives this before it ends."""

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
    """The two ends of a migration copy it into reserved slots.

    Once both are done, `ReleaseKV` commits it (the source's slots go) or rolls it back (the destination's).
    `during_batch_id` is the batch that reads the KV meanwhile, if any: it is committed after that. The
    positions of `windowless` have no KV in layers with a window, see `ReleaseWindows`.
    """

    migration_id: int
    migration: KVMigration
    during_batch_id: int | None = None
    windowless: tuple[range, ...] = ()


@dataclass(frozen=True, slots=True)
class ReleaseKV:
    """These instances free an owner's slots: of the positions given, or (None) all.

    With `is_void`, they are slots of a void batch, which may or may not have taken them.
    """

    owner_id: OwnerId
    instance_ids: tuple[InstanceId, ...]
    positions: range | None = None
    is_void: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseWindows:
    """These instances drop the KV of an owner's positions in layers with a window, where they have it.

    Other owners with the same slots lose it too.
    """

    owner_id: OwnerId
    instance_ids: tuple[InstanceId, ...]
    positions: range


@dataclass(frozen=True, slots=True)
class ShareKV:
    """`user_id` has the slots of another owner, too, at these positions. Nothing in flight makes that KV."""

    user_id: OwnerId
    segments: tuple[KVSegment, ...]

    @property
    def instance_ids(self) -> tuple[InstanceId, ...]:
        """The instances that have some of the KV."""
        return tuple(dict.fromkeys(segment.instance_id for segment in self.segments))


@dataclass(frozen=True, slots=True)
class LendSlots:
    """An instance takes free slots for another engine, until `ReleaseKV` of the loan frees them."""

    loan_id: OwnerId
    instance_id: InstanceId
    num_tokens: int


Instruction: TypeAlias = (
    RunBatch | ExtendLease | StopLease | MoveKV | ReleaseKV | ReleaseWindows | ShareKV | LendSlots
)
