"""What `ClusterState` keeps of live requests and of batches in flight."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from loong.core.errors import InvalidEventError
from loong.core.events import ProducedToken
from loong.core.instructions import Fork, RequestInput
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan
from loong.core.prompt_logprobs import ScoredChunk
from loong.core.request import NOTHING, Request, RequestId, RequestView, TokenId
from loong.core.shared_kv import SharedKV
from loong.core.snapshot import EXTENSION_STEPS, RunningBatch


@dataclass(slots=True)
class LiveRequest:
    """A request from its arrival to the release of its KV.

    `forks` wait for it to compute the prompt that is theirs too, so that its KV is theirs as well; none does
    once that is computed. Each has it as `leader` until then. `shared` is KV that it holds with others,
    `number` its place in the order of arrival.
    `is_noted` is whether its view is to be made anew.

    Once the end of its batch is foreseen, that is not `batch_id` but `ending_id` until it has ended, so that
    another one can be planned. `foreseen_at` is when it is to have a token that is not there yet. Who is to
    end then `is_leaving`: no policy sees it any more.
    """

    request: Request
    placement: Placement = field(default_factory=Placement)
    output_token_ids: list[TokenId] = field(default_factory=list)
    batch_id: int | None = None
    ending_id: int | None = None
    foreseen_at: float | None = None
    is_leaving: bool = False
    migration_ids: set[int] = field(default_factory=set)
    has_ended: bool = False
    has_lost_kv: bool = False
    last_dop: int | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    is_noted: bool = False
    forks: "list[LiveRequest]" = field(default_factory=list, repr=False, compare=False)
    leader: "LiveRequest | None" = field(default=None, repr=False, compare=False)
    shared: SharedKV | None = None
    number: int = 0

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing that is in flight touches it."""
        return self.batch_id is None and self.ending_id is None and not self.migration_ids

    @property
    def num_output_tokens(self) -> int:
        """Tokens that it has, with the one that is foreseen."""
        return len(self.output_token_ids) + (self.foreseen_at is not None)

    @property
    def is_over(self) -> bool:
        """Whether it, or at least all its KV, goes as soon as it is not in flight."""
        return self.has_ended or self.has_lost_kv

    def error_of_going_on(self) -> InvalidEventError:
        """That it has not ended with the last token that it may have."""
        return InvalidEventError(
            f"request {self.request.request_id} goes on after {len(self.output_token_ids)} "
            f"of at most {self.request.sampling_params.max_tokens} tokens"
        )

    def view(self) -> RequestView:
        """The request as policies see it."""
        request, foreseen_at = self.request, self.foreseen_at
        shared = NOTHING if self.shared is None else self.shared.held_by(request.request_id)
        return RequestView(  # by position, which is three times as quick as by name
            request.request_id,
            len(request.prompt_token_ids),
            self.num_output_tokens,
            request.sampling_params.max_tokens,
            request.arrival_time,
            request.slo,
            self.placement,
            self.batch_id,
            bool(self.migration_ids) or self.has_lost_kv,
            self.has_ended,
            request.user,
            foreseen_at if self.first_token_time is None else self.first_token_time,
            len(self.forks),
            self.shared.family_id if self.shared is not None and shared.segments else None,
            shared,
            request.priority,
            self.last_token_time if foreseen_at is None else foreseen_at,
        )

    def input_for(self, batch: BatchPlan) -> RequestInput:
        """What the workers of a batch must be told of this request."""
        first = self.placement.num_tokens
        stop = first + sum([len(b.positions) for b in batch.blocks_of(self.request.request_id)])
        prompt, outputs = self.request.prompt_token_ids, self.output_token_ids
        num_prompt, num_outputs = len(prompt), self.num_output_tokens
        if first >= num_prompt:
            token_ids: Sequence[TokenId] = tuple(outputs[first - num_prompt : stop - num_prompt])
        elif stop > num_prompt:
            token_ids = (*prompt[first:], *outputs[: stop - num_prompt])
        else:
            token_ids = prompt[first:stop]
        params = self.request.sampling_params if stop == num_prompt + num_outputs else None
        needs_output = params is not None and params.needs_output
        needs_prompt = params is not None and params.repetition_penalty != 1.0
        return RequestInput(  # by position, as above
            self.request.request_id,
            token_ids,
            num_prompt,
            num_outputs,
            self.placement,
            params,
            prompt if needs_prompt else (),
            tuple(outputs) if needs_output else (),
            tuple([fork.as_fork() for fork in self.forks]) if self.forks and params else (),
            None if self.foreseen_at is None else self.ending_id,
        )

    def scored_chunk(self, batch: BatchPlan) -> ScoredChunk | None:
        """Return what to score of the prompt in a batch; None if nothing, or if all of it has been.

        What is computed again before the first token is scored again.
        """
        num_top, prompt = self.request.num_prompt_logprobs, self.request.prompt_token_ids
        first = self.placement.num_tokens
        if num_top is None or self.num_output_tokens or first >= len(prompt) - 1:
            return None
        stop = first + sum([len(b.positions) for b in batch.blocks_of(self.request.request_id)])
        next_token_id = prompt[stop] if stop < len(prompt) else None
        return ScoredChunk(self.request.request_id, next_token_id, num_top)

    def as_fork(self) -> Fork:
        """What the workers of the batch that ends its leader's prompt must be told of it."""
        return Fork(self.request.request_id, self.request.sampling_params)


@dataclass(slots=True)
class InFlightBatch:
    """A batch in flight, as policies see it; `sampled` are the requests that get a token at each step.

    Those whose prompts it ends get theirs together with their forks, which the plan does not name.
    `num_tokens` is how many each has got, `ends_at` when its end is foreseen.
    """

    running: RunningBatch
    sampled: dict[RequestId, LiveRequest]
    ends_at: float | None = None
    num_tokens: dict[RequestId, int] = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = dict.fromkeys(self.sampled, 0)

    @property
    def plan(self) -> BatchPlan:
        """What was to be done."""
        return self.running.plan

    @property
    def forks(self) -> list[LiveRequest]:
        """Those that are to begin when it ends."""
        if self.is_lease:
            return []
        return [live for live in self.sampled.values() if live.leader is not None]

    @property
    def request_ids(self) -> frozenset[RequestId]:
        """All requests that it touches."""
        return frozenset(self.plan.request_ids).union(self.sampled)

    @property
    def is_lease(self) -> bool:
        """Whether it may end before it has made all KV that it reserved."""
        return self.plan.num_steps > 1

    def take_step(self, step: int, tokens: Iterable[ProducedToken], time: float) -> list[LiveRequest]:
        """Give requests the tokens of `step`, told at `time`; returns those that had not ended before.

        Raises `InvalidEventError`: no step gives two tokens of a request, none is left out, and whatever has
        its last token ends.
        """
        sampled, num_tokens, took = self.sampled, self.num_tokens, []
        is_due = step < self.running.plan.num_steps
        for request_id, token_id, finish_reason, _ in tokens:  # all in one place: a call a token would count
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
                live.has_ended = True
            elif len(live.output_token_ids) >= live.request.sampling_params.max_tokens:
                raise live.error_of_going_on()
            took.append(live)
        if step >= self.running.num_steps_taken:
            self.running = self.running.after(step, time)
        return took

    def _error_of(self, request_id: RequestId, step: int) -> InvalidEventError:
        """Why there can be no token of a request at `step`."""
        produced = f"batch {self.running.batch_id} produced a token of {request_id}"
        if request_id not in self.sampled:
            return InvalidEventError(f"{produced}, which it does not sample")
        return InvalidEventError(
            f"{produced} at step {step}, "
            f"but step {self.num_tokens[request_id]} of {self.running.plan.num_steps} is due"
        )

    def has_come_near_its_end(self, step: int) -> bool:
        """Whether `step`, the one taken last, is the first after which the lease is ending."""
        running, first = self.running, max(1, self.plan.num_steps - EXTENSION_STEPS)
        return step + 1 == running.num_steps_taken == first and running.is_ending

    def start(self, time: float) -> None:
        """Take in that its group has begun it. Raises `InvalidEventError` if it had before."""
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
            if self.num_tokens[request_id] != num_steps and not live.is_over:
                raise InvalidEventError(
                    f"batch {self.running.batch_id} finished after {num_steps} steps, "
                    f"but produced {self.num_tokens[request_id]} tokens of {request_id}"
                )

    def made(self, live: LiveRequest) -> tuple[KVSegment, ...]:
        """What is stored of a request: all that was reserved, but for the steps that a lease did not take."""
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

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of which KV was made; in a lease one for each token produced."""
        if self.is_lease:
            return sum(self.num_tokens.values())
        return sum(self.plan.num_stored_tokens.values())
