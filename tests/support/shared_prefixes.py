"""A cluster that keeps prefixes, driven by hand: requests borrow all that there is for them."""

from collections.abc import Sequence
from itertools import count
from typing import Any

from plans import prefill

from loong.core.events import (
    BatchEndPredicted,
    BatchFinished,
    BatchStarted,
    ProducedToken,
    RequestAborted,
    RequestArrived,
    TokensProduced,
)
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.instructions import Instruction, RunBatch
from loong.core.placement import InstanceId
from loong.core.plan import Borrowing, IterationPlan, Preemption, PreemptionReason
from loong.core.request import FinishReason, Request, RequestId, RequestView, SamplingParams
from loong.core.snapshot import Snapshot
from loong.state.cluster_state import ClusterState


class PrefixCluster:
    """Instances, and what a client and a policy do with them; the accounting is checked after each step."""

    def __init__(self, num_instances: int = 2, kv_capacity: int = 1000) -> None:
        instances = (ElasticInstance(i, 1, InstanceKind.FULL, kv_capacity) for i in range(num_instances))
        self.state = ClusterState(tuple(instances), keeps_prefixes=True)
        self.runs: dict[int, RunBatch] = {}
        self.times = count(1.0)

    def snapshot(self) -> Snapshot:
        """Return the state, which is right."""
        self.state.check()
        return self.state.snapshot(next(self.times))

    def view(self, request_id: RequestId) -> RequestView:
        """Return a request as policies see it."""
        return self.snapshot().request[request_id]

    @property
    def visible(self) -> list[RequestId]:
        """Return the requests that policies see."""
        return sorted(self.snapshot().request)

    @property
    def following(self) -> list[RequestId]:
        """Return those that wait for another."""
        return sorted(view.request_id for view in self.snapshot().following)

    def arrive(self, request_id: RequestId, token_ids: Sequence[int], **changes: Any) -> None:
        """Let a request arrive."""
        params = changes.pop("sampling_params", SamplingParams(max_tokens=8, stop_token_ids=(0,)))
        request = Request(request_id, token_ids, params, arrival_time=next(self.times), **changes)
        self.state.apply(RequestArrived(request.arrival_time, request))

    def abort(self, request_id: RequestId) -> None:
        """Let a client leave."""
        self.state.apply(RequestAborted(next(self.times), request_id))

    def preempt(self, request_id: RequestId) -> tuple[Instruction, ...]:
        """Drop the KV of a request."""
        preemption = Preemption(request_id, PreemptionReason.NO_ROOM)
        return self.state.commit(IterationPlan(preemptions=(preemption,)), self.snapshot())

    def begin(
        self, request_id: RequestId, num_tokens: int | None = None, group: Sequence[InstanceId] = (0,)
    ) -> int:
        """Begin a batch with the next tokens of a request, after all that it can borrow; return its id."""
        view = self.view(request_id)
        cached = tuple(c.segment for c in view.cached)
        if cached:
            view = view.borrowing(cached)
        return self.begin_with(view, Borrowing(request_id, cached), group, num_tokens)

    def begin_with(
        self,
        view: RequestView,
        borrowing: Borrowing,
        group: Sequence[InstanceId],
        num_tokens: int | None = None,
    ) -> int:
        """Begin a batch of a request that has borrowed what a plan says; return its id."""
        batch = prefill([view], group, num_tokens=num_tokens)
        borrowings = (borrowing,) if borrowing.segments else ()
        plan = IterationPlan((batch,), borrowings=borrowings)
        found = [i for i in self.state.commit(plan, self.snapshot()) if isinstance(i, RunBatch)]
        self.runs[found[0].batch_id] = found[0]
        return found[0].batch_id

    def predict_end(self, batch_id: int) -> None:
        """Predict the end of a batch."""
        self.state.apply(BatchEndPredicted(next(self.times), batch_id, next(self.times)))

    def finish(
        self, batch_id: int, token_id: int = 7, finish_reason: FinishReason | None = None
    ) -> tuple[Instruction, ...]:
        """End a batch of one step; all that it samples is one token."""
        self.state.apply(BatchStarted(next(self.times), batch_id))
        sampled = [i for i in self.runs.pop(batch_id).inputs if i.sampling_params is not None]
        request_ids = [r for i in sampled for r in (i.request_id, *(s.request_id for s in i.siblings))]
        tokens = tuple(ProducedToken(r, token_id, finish_reason) for r in request_ids)
        self.state.apply(TokensProduced(next(self.times), batch_id, 0, tokens))
        return self.state.apply(BatchFinished(next(self.times), batch_id, 1)).instructions

    def run(self, request_id: RequestId, num_tokens: int | None = None, **ends: Any) -> None:
        """Begin and end a batch with the next tokens of a request."""
        self.finish(self.begin(request_id, num_tokens), **ends)

    def run_to_end(self, request_id: RequestId) -> None:
        """Compute the rest of what a request needs for a token, with which it ends."""
        self.run(request_id, token_id=0, finish_reason=FinishReason.STOP)
