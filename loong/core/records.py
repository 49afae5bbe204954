"""What `ClusterState` keeps of live requests and of batches in flight."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from loong.core.instructions import RequestInput
from loong.core.placement import KVSegment, Placement
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
    last_dop: int | None = None

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing that is in flight touches it."""
        return self.batch_id is None and not self.migration_ids

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
        )

    def input_for(self, batch: BatchPlan) -> RequestInput:
        """What the workers of a batch must be told of this request."""
        first = self.placement.num_tokens
        stop = first + sum(len(b.positions) for b in batch.blocks_of(self.request.request_id))
        prompt, outputs = self.request.prompt_token_ids, tuple(self.output_token_ids)
        num_prompt = len(prompt)
        token_ids = (*prompt[first:stop], *outputs[max(0, first - num_prompt) : max(0, stop - num_prompt)])
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
            output_token_ids=outputs if needs_history else (),
        )


@dataclass(slots=True)
class InFlightBatch:
    """A batch in flight."""

    plan: BatchPlan
    started_at: float
    last_step: int
    num_steps_taken: int = 0
    num_tokens: Counter[RequestId] = field(default_factory=Counter)  # produced, a request

    def computed(self, request_id: RequestId) -> Iterator[KVSegment]:
        """The KV that now exists: all writes of a single step, those of the steps taken of a lease."""
        for segment in self.plan.writes_of(request_id):
            positions = segment.positions
            if self.plan.num_steps > 1:
                first = self.plan.blocks_of(request_id)[0].positions.start
                positions = intersection(positions, range(first, first + self.num_tokens[request_id]))
            if positions:
                yield replace(segment, positions=positions)
