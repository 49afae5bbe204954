"""A batch in flight, as `ClusterState` keeps it."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from loong.core.applied import CommittedBatch
from loong.core.cluster_history import TokensOf
from loong.core.errors import InvalidEventError
from loong.core.events import ProducedToken
from loong.core.instructions import RunBatch
from loong.core.placement import KVSegment
from loong.core.plan import BatchPlan
from loong.core.request import FinishReason, RequestId
from loong.core.snapshot import EXTENSION_STEPS, RunningBatch
from loong.core.void_batches import BatchParts
from loong.state.live_request import LiveRequest


@dataclass(slots=True)
class InFlightBatch:
    """A batch in flight: the `instruction` that began it, and the batch as policies see it (`running`).

    `sampled` are the requests that get a token at each step. A request whose prompt it completes gets its
    token together with its siblings, which the plan does not name. `num_tokens` counts the tokens of each,
    `ends_at` is its predicted end.
    """

    instruction: RunBatch
    running: RunningBatch
    sampled: dict[RequestId, LiveRequest]
    kv_reserved: TokensOf = ()
    ends_at: float | None = None
    num_tokens: dict[RequestId, int] = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = dict.fromkeys(self.sampled, 0)

    @property
    def plan(self) -> BatchPlan:
        """Return its plan."""
        return self.running.plan

    @property
    def has_predicted_end(self) -> bool:
        """Return whether the state is shown as after its end."""
        return self.ends_at is not None

    @property
    def siblings(self) -> list[LiveRequest]:
        """Return the requests that begin when it ends."""
        if self.is_lease:
            return []
        return [live for live in self.sampled.values() if live.is_sibling]

    @property
    def request_ids(self) -> frozenset[RequestId]:
        """Return all requests that it touches."""
        return frozenset(self.plan.request_ids).union(self.sampled)

    @property
    def committed(self) -> CommittedBatch:
        """Return it as observers see it."""
        return CommittedBatch(self.instruction, self.running, self.kv_reserved)

    @property
    def parts(self) -> BatchParts:
        """Return the instances that have a part in it, and its requests."""
        return BatchParts(self.running.batch_id, self.running.participant_ids, self.request_ids)

    @property
    def is_lease(self) -> bool:
        """Return whether it may end before it has made all KV that it reserved."""
        return self.plan.num_steps > 1

    def take_step(self, step: int, tokens: Iterable[ProducedToken], time: float) -> list[LiveRequest]:
        """Add the tokens of `step` to requests, by an event at `time`.

        Return those that had not ended before.

        Raises `InvalidEventError` if a request gets two tokens or none in a step, or goes on after its last
        token.
        """
        sampled, num_tokens, took = self.sampled, self.num_tokens, []
        is_due = step < self.running.plan.num_steps
        for request_id, token_id, finish_reason, _ in tokens:  # inline: a call for each token would be slow
            live = sampled.get(request_id)
            if live is None or num_tokens[request_id] != step or not is_due:
                raise self._error_of(request_id, step)
            num_tokens[request_id] = step + 1
            if live.has_ended:  # an aborted one is computed until its batch ends
                continue
            if live.first_token_time is None:
                live.first_token_time = time
            live.last_token_time = time
            live.output_token_ids.append(token_id)
            if finish_reason is not None:
                live.has_ended, live.is_sound = True, finish_reason is not FinishReason.ERROR
            elif len(live.output_token_ids) >= live.request.sampling_params.max_tokens:
                raise live.error_of_going_on()
            took.append(live)
        if step >= self.running.num_steps_taken:
            self.running = self.running.after(step, time)
        return took

    def _error_of(self, request_id: RequestId, step: int) -> InvalidEventError:
        """Return the error of a token of a request at `step`."""
        produced = f"batch {self.running.batch_id} produced a token of {request_id}"
        if request_id not in self.sampled:
            return InvalidEventError(f"{produced}, which it does not sample")
        return InvalidEventError(
            f"{produced} at step {step}, "
            f"but step {self.num_tokens[request_id]} of {self.running.plan.num_steps} is due"
        )

    def has_come_near_its_end(self, step: int) -> bool:
        """Return whether `step`, the one taken last, is the first after which the lease is ending."""
        running, first = self.running, max(1, self.plan.num_steps - EXTENSION_STEPS)
        return step + 1 == running.num_steps_taken == first and running.is_ending

    def start(self, time: float) -> None:
        """Record that its group has begun it. Raises `InvalidEventError` if it had begun before."""
        if self.running.has_started or self.running.num_steps_taken:
            raise InvalidEventError(f"batch {self.running.batch_id} started, but has started before")
        self.running = replace(self.running, started_at=time, stepped_at=time, has_started=True)

    def extend(self, plan: BatchPlan) -> None:
        """Go on with `plan`, the same lease with more steps."""
        self.running = replace(self.running, plan=plan, last_step=plan.num_steps)

    def end_before(self, step: int) -> None:
        """End the lease before `step`, if it does not end earlier."""
        self.running = replace(self.running, last_step=min(step, self.running.last_step))

    def check_finished(self, num_steps: int) -> None:
        """Raise `InvalidEventError` unless each sampled request got `num_steps` tokens, or is over."""
        for request_id, live in self.sampled.items():
            if self.num_tokens[request_id] != num_steps and not live.has_ended:
                raise InvalidEventError(
                    f"batch {self.running.batch_id} finished after {num_steps} steps, "
                    f"but produced {self.num_tokens[request_id]} tokens of {request_id}"
                )

    def made(self, live: LiveRequest) -> tuple[KVSegment, ...]:
        """Return the stored KV of a request: the reserved KV without steps that a lease did not take."""
        request_id, plan = live.request.request_id, self.plan
        writes = plan.writes_of(request_id)
        if plan.num_steps == 1 or plan.num_steps == (num_steps := self.num_tokens[request_id]):
            return writes
        stop = plan.blocks_of(request_id)[0].positions.start + num_steps
        return tuple(
            KVSegment(request_id, range(p.start, min(p.stop, stop), p.step), segment.instance_id)
            for segment in writes
            if (p := segment.positions).start < stop
        )

    def unfinished(self, live: LiveRequest) -> tuple[KVSegment, ...]:
        """Return the KV of a request that the batch may or may not have made, if it never ends.

        A lease has made KV for each token that it produced; of other batches nothing is certain.
        """
        request_id, plan = live.request.request_id, self.plan
        if not self.is_lease:
            return plan.writes_of(request_id)
        first = plan.blocks_of(request_id)[0].positions.start + self.num_tokens[request_id]
        return tuple(
            segment._replace(positions=rest)
            for segment in plan.writes_of(request_id)
            if (rest := range(first, segment.positions.stop))
        )

    def unfinished_positions(self, live: LiveRequest) -> range:
        """Return the positions of `unfinished`, and any between them."""
        positions = [segment.positions for segment in self.unfinished(live)]
        return range(
            min((p[0] for p in positions), default=0), max((p[-1] + 1 for p in positions), default=0)
        )

    @property
    def num_computed_tokens(self) -> int:
        """Return the tokens whose KV was made; in a lease one for each token produced."""
        if self.is_lease:
            return sum(self.num_tokens.values())
        return sum(self.plan.num_stored_tokens.values())
