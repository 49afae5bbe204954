"""Requests: a client's parameters, and the view that a policy has."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from math import inf
from operator import attrgetter
from typing import Self, TypeAlias

from loong.core.errors import InvalidRequestError
from loong.core.grammar import Grammar
from loong.core.limits import LIMITS, NUM_SEEDS, beyond_limits, check_limits, check_token_ids
from loong.core.placement import (
    BorrowedKV,
    CachedKV,
    InstanceId,
    KVSegment,
    OwnerId,
    Placement,
    tokens_by_instance,
)
from loong.core.positions import EMPTY, coalesce, common
from loong.core.value import value

RequestId: TypeAlias = OwnerId
TokenId: TypeAlias = int

_ALWAYS_GIVEN = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
)


class FinishReason(StrEnum):
    """The reason why a request ended.

    The values are the OpenAI API's, `abort` and `error` are vLLM's, the last two are ours.

    A request is stuck where its grammar allows no token, and costly where these take too long to find.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    STUCK = "stuck"
    COSTLY = "costly"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of sampling; names and meanings as in vLLM.

    `temperature` 0 is greedy. `top_k` None keeps all. `seed` fixes every draw of the request, in any batch,
    on any instance and at any DoP. `stop_token_ids` holds every token that ends the output, the model's
    end-of-sequence tokens included; they cannot be drawn before `min_tokens`. `num_logprobs` None asks for
    none. `logit_bias` is added to the logits of these tokens. The output follows the `grammar`;
    `stop_token_ids` may end it only where it is complete. It has only tokens of `allowed_token_ids`; None
    allows all. It has none of `bad_words`, which are sequences of tokens.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[TokenId, ...] = ()
    num_logprobs: int | None = None
    logit_bias: tuple[tuple[TokenId, float], ...] = ()
    grammar: Grammar | None = None
    allowed_token_ids: tuple[TokenId, ...] | None = None
    bad_words: tuple[tuple[TokenId, ...], ...] = ()

    def __post_init__(self) -> None:
        # A worker does this for each of its requests with every step.
        for name, given, (low, high) in zip(_ALWAYS_GIVEN, _always_given(self), _ALWAYS_LIMITS, strict=True):
            if not low <= given <= high:
                raise beyond_limits(name, given, low, high)
        if self.min_tokens > self.max_tokens:
            raise beyond_limits("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.top_k is not None:
            check_limits("top_k", self.top_k)
        if self.num_logprobs is not None:
            check_limits("logprobs", self.num_logprobs)
        low, high = LIMITS["logit_bias"]
        for _, bias in self.logit_bias:
            if not low <= bias <= high:
                raise beyond_limits("logit_bias", bias, low, high)

    @property
    def has_penalties(self) -> bool:
        """Return whether the choice depends on the tokens seen so far."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def is_plain(self) -> bool:
        """Return whether tokens are drawn from unchanged logits without reported log probabilities."""
        return (
            self.num_logprobs is None
            and not self.min_tokens
            and not self.logit_bias
            and self.allowed_token_ids is None
            and not self.bad_words
            and not self.needs_output
        )

    @property
    def needs_output(self) -> bool:
        """Return whether the choice depends on the output so far, by itself or through the host."""
        return self.has_penalties or self.grammar is not None or any(len(word) > 1 for word in self.bad_words)

    def finish_reason(self, num_output_tokens: int, token_id: TokenId) -> FinishReason | None:
        """Return why the request ends with `token_id` as its output token `num_output_tokens`.

        None if it does not.
        """
        if token_id in self.stop_token_ids and num_output_tokens > self.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output_tokens >= self.max_tokens else None


_ALWAYS_LIMITS = tuple(LIMITS[name] for name in _ALWAYS_GIVEN)
_always_given = attrgetter(*_ALWAYS_GIVEN)


@dataclass(frozen=True, slots=True)
class SLO:
    """A request's targets in seconds: to the first token, and for each token after it.

    None stands for the policy's own target, infinity for no target.
    """

    ttft: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        for name, seconds in (("ttft", self.ttft), ("tpot", self.tpot)):
            if seconds is not None and seconds != inf:
                check_limits(name, seconds)


@dataclass(frozen=True, slots=True)
class Continuation:
    """The output that a request already has, from an engine that was lost. The next token follows it.

    `first_token_age` are the seconds since its first token.
    """

    output_token_ids: Sequence[TokenId]
    first_token_age: float = 0.0


@dataclass(frozen=True, slots=True)
class NewRequest:
    """One prompt to complete, with one or more choices, before it has arrived at an engine.

    The prompt is a tuple where requests are served. A simulation has an array, or a `range`, which takes no
    memory for its length. The caller checks its ids: there may be a million. `user` names the end user, as in
    the OpenAI API; "" is a user without a name. Each step of `priority` doubles the time that it may take to
    its first token; those below 0 halve it. `num_prompt_logprobs` None asks for no log probabilities of the
    prompt's tokens, another number for as many of the likeliest at each position too. Requests share KV with
    those of the same `cache_salt`, and those that do not use the cache with none. One that `continues` an
    output goes on as after a preemption: all its KV is computed from known tokens.
    """

    request_id: RequestId
    prompt_token_ids: Sequence[TokenId]
    sampling_params: SamplingParams
    slo: SLO | None = None
    user: str = ""
    num_choices: int = 1
    priority: int = 0
    num_prompt_logprobs: int | None = None
    cache_salt: str = ""
    uses_cache: bool = True
    continues: Continuation | None = None

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty; it needs at least one token", param="prompt")
        check_limits("n", self.num_choices)
        check_limits("priority", self.priority)
        if self.num_prompt_logprobs is not None:
            check_limits("prompt_logprobs", self.num_prompt_logprobs)
        params = self.sampling_params
        if self.continues is not None:
            if self.num_choices > 1:
                raise beyond_limits("n of a request that continues", self.num_choices, 1, 1)
            if (num_tokens := len(self.continues.output_token_ids)) >= params.max_tokens:
                raise beyond_limits("output to continue", num_tokens, 0, params.max_tokens - 1)
        check_token_ids("stop_token_ids", params.stop_token_ids)
        check_token_ids("logit_bias", [token_id for token_id, _ in params.logit_bias])
        check_token_ids("allowed_token_ids", params.allowed_token_ids or ())
        check_token_ids("bad_words", [token_id for word in params.bad_words for token_id in word])

    @property
    def choice_ids(self) -> tuple[RequestId, ...]:
        """Return the ids of its choices; the first has the id of the request."""
        others = (f"{self.request_id}-{number}" for number in range(1, self.num_choices))
        return (self.request_id, *others)

    def choices(self) -> tuple[Self, ...]:
        """Return a request for each choice, whose seeds count up from the seed of this one."""
        if self.num_choices == 1:
            return (self,)
        return tuple(map(self._choice, range(self.num_choices), self.choice_ids))

    def _choice(self, number: int, choice_id: RequestId) -> Self:
        seed = (self.sampling_params.seed + number) % NUM_SEEDS
        return replace(
            self,
            request_id=choice_id,
            sampling_params=replace(self.sampling_params, seed=seed),
            num_choices=1,
        )

    def arriving(self, time: float) -> "Request":
        """Return the request as it arrives at `time`, by the clock of its engine."""
        values = {name: getattr(self, name) for name in NewRequest.__slots__}
        return Request(**values, arrival_time=time)


@dataclass(frozen=True, slots=True)
class Request(NewRequest):
    """A request that has arrived at an engine, at `arrival_time` of the engine's clock."""

    arrival_time: float = field(kw_only=True)


@value
class RequestView:
    """The view that a policy has of a live request. Known tokens are the prompt's and those produced so far.

    `first_token_time` is that of the event with the first output token, `last_token_time` that of the newest;
    a preemption keeps both. `num_siblings` is the number of requests that begin with the KV of its prompt
    once that is computed; policies see them from then on. `borrowed` is the part of its KV that belongs to
    other owners and that other requests read too. `num_losses` counts the instances that were lost in a row
    while they computed it, or served its KV: each while some of the `suspected` positions were in
    computation. None of these has been computed since. `num_other_losses` counts the losses since its arrival
    that are not in this row.

    A request that waits may borrow what is `cached`: a plan in which it begins says how much. Where a policy
    assumes that it borrows, its `placement` has what is left in `cached`. If there are `no_ends`, it borrows
    no position behind one that it lacks, and does not begin to compute at one of these.
    """

    request_id: RequestId
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    arrival_time: float
    slo: SLO | None
    placement: Placement
    batch_id: int | None = None
    is_migrating: bool = False  # or about to lose its KV, once nothing in flight touches it
    has_ended: bool = False  # finished or aborted, and waiting for its batch to end
    user: str = ""
    first_token_time: float | None = None
    num_siblings: int = 0
    borrowed: tuple[BorrowedKV, ...] = ()
    priority: int = 0
    last_token_time: float | None = None
    num_losses: int = 0
    suspected: range = EMPTY
    num_other_losses: int = 0
    cached: tuple[CachedKV, ...] = ()
    no_ends: tuple[range, ...] = ()

    @property
    def has_begun(self) -> bool:
        """Return whether it runs: it has KV, or is in a batch; all others wait."""
        return self.batch_id is not None or (bool(self.placement.segments) and not self.cached)

    def borrowing(self, segments: Iterable[KVSegment]) -> "RequestView":
        """Return the same request, which has nothing, with KV of other owners."""
        by_place: dict[InstanceId, list[range]] = {}
        for segment in segments:
            by_place.setdefault(segment.instance_id, []).append(segment.positions)
        own = [KVSegment(self.request_id, p, i) for i, ranges in by_place.items() for p in coalesce(ranges)]
        return replace(self, placement=Placement(tuple(own)))

    def declaring(self, max_tokens: int) -> "RequestView":
        """Return the same request with another maximum of output tokens."""
        return RequestView(  # by position, which is faster than by name
            self.request_id,
            self.num_prompt_tokens,
            self.num_output_tokens,
            max_tokens,
            self.arrival_time,
            self.slo,
            self.placement,
            self.batch_id,
            self.is_migrating,
            self.has_ended,
            self.user,
            self.first_token_time,
            self.num_siblings,
            self.borrowed,
            self.priority,
            self.last_token_time,
            self.num_losses,
            self.suspected,
            self.num_other_losses,
            self.cached,
            self.no_ends,
        )

    @property
    def num_known_tokens(self) -> int:
        """Return the tokens whose ids are known: the KV of all but the last is needed to go on."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Return the tokens whose KV exists."""
        return self.placement.num_tokens

    @property
    def has_holes(self) -> bool:
        """Return whether KV is missing before some that exists, as after the loss of an instance."""
        return self.placement.has_holes

    @property
    def missing(self) -> tuple[range, ...]:
        """Return the positions of known tokens whose KV does not exist, in disjoint ranges.

        Batches compute them from the lowest on. The stripe that instance i of P has lost is `range(i, n, P)`.
        """
        placement = self.placement
        return (*placement.holes, range(placement.stop, self.num_known_tokens))

    @property
    def num_uncomputed_tokens(self) -> int:
        """Return the tokens to compute before the next one can be sampled; 1 in the decode phase."""
        return self.num_prompt_tokens + self.num_output_tokens - self.placement.num_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Return the output tokens that it may still produce."""
        return self.max_tokens - self.num_output_tokens

    @property
    def num_final_tokens(self) -> int:
        """Return the tokens whose KV exists when it and all its siblings end at the declared maximum.

        The last token of each needs none.
        """
        return self.num_prompt_tokens + (1 + self.num_siblings) * (self.max_tokens - 1)

    @property
    def num_tokens_to_come(self) -> int:
        """Return how many of these have no slot of a request that runs yet; 0 if it has ended."""
        if self.has_ended:
            return 0
        num_unread = sum(self.num_unread_tokens().values()) if self.cached else 0
        return self.num_final_tokens - self.placement.num_tokens + num_unread

    def num_unread_tokens(self) -> Counter[InstanceId]:
        """Return the tokens that it would borrow and nobody reads: as many more slots are in use then."""
        unread = (c.segment for c in self.cached if not c.is_read) if self.placement.segments else ()
        return tokens_by_instance(unread)

    @property
    def num_own_tokens(self) -> int:
        """Return the tokens whose slots become free once it no longer holds them."""
        return self.placement.num_tokens - self.num_borrowed_tokens

    @property
    def num_borrowed_tokens(self) -> int:
        """Return the tokens whose slots others go on to read."""
        return sum([part.placement.num_tokens for part in self.borrowed])

    def own_tokens_by_instance(self) -> Mapping[InstanceId, int]:
        """Return the number of own tokens on each instance."""
        held = self.placement.tokens_by_instance()
        if not self.borrowed:
            return held
        own = Counter(held)
        for part in self.borrowed:
            own.subtract(part.placement.tokens_by_instance())
        return own

    def num_own_tokens_of(self, segment: KVSegment) -> int:
        """Return the number of own tokens among these, which it has."""
        borrowed = chain.from_iterable(part.placement.on(segment.instance_id) for part in self.borrowed)
        return len(segment.positions) - sum(map(len, common((segment.positions,), *borrowed)))

    @property
    def is_decoding(self) -> bool:
        """Return whether a step computes only its newest token."""
        num_known = self.num_prompt_tokens + self.num_output_tokens
        return self.num_output_tokens > 0 and num_known - self.placement.num_tokens == 1

    @property
    def is_plannable(self) -> bool:
        """Return whether a plan may name it: not in flight, and not over."""
        return self.batch_id is None and not self.is_migrating and not self.has_ended

    @property
    def is_copyable(self) -> bool:
        """Return whether its KV may begin to migrate, perhaps while a batch reads it."""
        return not self.is_migrating and not self.has_ended
