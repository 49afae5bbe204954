"""What `ClusterState` keeps of live requests and of batches in flight."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from loong.core.errors import InvalidEventError
from loong.core.events import ProducedToken
from loong.core.instructions import RequestInput
from loong.core.placement import InstanceId, KVSegment, Placement
from loong.core.plan import BatchPlan
from loong.core.positions import intersection
from loong.core.request import Request, RequestId, RequestView, TokenId


@dataclass(slots=True)
class LiveRequest:
    """A request from its arrival to the release of its KV."""

    request: Request
    placement: Placement = field(default_factory=Placement)
    output_token_ids: list[TokenId] = field(default_factory=list)
    batch_id: int | None = None
    migration_ids: set[int] = field(default_factory=set)
    has_ended: bool = False
    has_lost_kv: bool = False  # the rest of its KV is dropped as soon as it is at rest
    last_dop: int | None = None
    first_token_time: float | None = None

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing that is in flight touches it."""
        return self.batch_id is None and not self.migration_ids

    def produce(self, token: ProducedToken, time: float) -> None:
        """Take in its next output token, told at `time`."""
        if self.first_token_time is None:
            self.first_token_time = time
        self.output_token_ids.append(token.token_id)
        self.has_ended = token.finish_reason is not None
        num_tokens, max_tokens = len(self.output_token_ids), self.request.sampling_params.max_tokens
        if num_tokens >= max_tokens and not self.has_ended:
            raise InvalidEventError(
                f"request {token.request_id} goes on after {num_tokens} of at most {max_tokens} tokens"
            )

    def lose(self, instance_id: InstanceId) -> None:
        """Take in that an instance is gone, with the KV it held."""
        self.placement = self.placement.without(instance_id)
        self.has_lost_kv = True

    def view(self) -> RequestView:
        """The request as policies see it."""
        return RequestView(
            request_id=self.request.request_id,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_output_tokens=len(self.output_token_ids),
            max_tokens=self.request.sampling_params.max_tokens,
            arrival_time=self.request.arrival_time,
            slo=self.request.slo,
            placement=self.placement,
            batch_id=self.batch_id,
            is_migrating=bool(self.migration_ids),
            has_ended=self.has_ended,
            user=self.request.user,
            first_token_time=self.first_token_time,
        )

    def input_for(self, batch: BatchPlan) -> RequestInput:
        """What the workers of a batch must be told of this request."""
        first = self.placement.num_tokens
        stop = first + sum(len(b.positions) for b in batch.blocks_of(self.request.request_id))
        prompt, outputs = self.request.prompt_token_ids, self.output_token_ids
        num_prompt = len(prompt)
        token_ids = prompt[first:stop]
        if stop > num_prompt:
            token_ids = (*token_ids, *outputs[max(0, first - num_prompt) : stop - num_prompt])
        params = self.request.sampling_params if stop == num_prompt + len(outputs) else None
        needs_history = params is not None and params.has_penalties
        return RequestInput(
            request_id=self.request.request_id,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt,
            num_output_tokens=len(outputs),
            placement=self.placement,
            sampling_params=params,
            prompt_token_ids=prompt if needs_history else (),
            output_token_ids=tuple(outputs) if needs_history else (),
        )


@dataclass(slots=True)
class InFlightBatch:
    """A batch in flight. `sampling_ids` are the requests that get a token at each step."""

    batch_id: int
    plan: BatchPlan
    started_at: float
    sampling_ids: frozenset[RequestId]
    last_step: int
    num_steps_taken: int = 0
    num_tokens: Counter[RequestId] = field(default_factory=Counter)  # produced, a request

    def check_samples(self, request_id: RequestId) -> None:
        """Raise `InvalidEventError` unless the batch produces tokens of this request."""
        if request_id not in self.sampling_ids:
            raise InvalidEventError(
                f"batch {self.batch_id} produced a token of {request_id}, which it does not sample"
            )

    def count_token(self, request_id: RequestId, step: int) -> None:
        """Take in that `step` gave a token of a request. No step gives two, and none is left out."""
        due = self.num_tokens[request_id]
        if step != due or step >= self.plan.num_steps:
            raise InvalidEventError(
                f"batch {self.batch_id} produced a token of {request_id} at step {step}, "
                f"but step {due} of {self.plan.num_steps} is due"
            )
        self.num_tokens[request_id] += 1

    def check_finished(self, request_ids: Iterable[RequestId], num_steps: int) -> None:
        """Raise `InvalidEventError` unless each of these that is sampled got a token of all `num_steps`."""
        for request_id in self.sampling_ids.intersection(request_ids):
            if self.num_tokens[request_id] != num_steps:
                raise InvalidEventError(
                    f"batch {self.batch_id} finished after {num_steps} steps, "
                    f"but produced {self.num_tokens[request_id]} tokens of {request_id}"
                )

    def unused(self, request_id: RequestId) -> Iterator[KVSegment]:
        """What a lease that ended early reserved for steps that it did not take."""
        if self.plan.num_steps > 1:
            first = self.plan.blocks_of(request_id)[0].positions[0] + self.num_tokens[request_id]
            for segment in self.plan.writes_of(request_id):
                if positions := intersection(segment.positions, range(first, segment.positions[-1] + 1)):
                    yield replace(segment, positions=positions)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of which KV was made: all that were to be stored, less those of steps not taken."""
        unused = (segment for request_id in self.plan.request_ids for segment in self.unused(request_id))
        return _num_tokens(self.plan.writes) - _num_tokens(unused)


def _num_tokens(segments: Iterable[KVSegment]) -> int:
    return sum(len(segment.positions) for segment in segments)
