"""The requests of a load in virtual time, with the turns that answers release."""

from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile

import numpy as np

from loong.core.events import Event, TokensProduced
from loong.core.limits import MAX_TOKEN_ID
from loong.core.request import SLO, Request, RequestId, SamplingParams, TokenId
from loong.simulation.cluster import SimulatedCluster
from loong.simulation.config import Load
from loong.workloads.metrics.slo import LimitsOf
from loong.workloads.request import RequestShape, WorkloadRequest


@dataclass(frozen=True, slots=True)
class _Answering:
    """A request whose answer a turn waits for, and the answer so far.

    `first` is the number of the first turn of their session.
    """

    first: int
    request: Request
    token_ids: list[TokenId] = field(default_factory=list)


class Arrivals:
    """The requests of a load that its cluster can hold.

    Iterated, it has those that arrive by themselves, in their order. `released` has the later turns of
    sessions, each its think time after the answer before it has ended. After `is_over` nothing arrives.
    `output_lengths` has the tokens of the answers to come.
    """

    def __init__(
        self, load: Load, cluster: SimulatedCluster, limits_of: LimitsOf, is_over: Callable[[], bool]
    ) -> None:
        self.output_lengths: dict[RequestId, int] = {}
        self._load, self._cluster, self._limits_of, self._is_over = load, cluster, limits_of, is_over
        self._held: dict[int, deque[tuple[int, WorkloadRequest]]] = defaultdict(deque)  # by first turn
        self._answering: dict[RequestId, _Answering] = {}

    def __iter__(self) -> Iterator[Request]:
        """Draw requests one by one. The turns that follow one are known when the next is drawn."""
        first = 0
        following = takewhile(lambda _: not self._is_over(), self._load.following)
        for number, sent in enumerate(chain(self._load.measured, following)):
            if not sent.shape.is_follower:
                first = number
            if not is_admissible(sent, self._cluster, self._load.declared_tokens):
                continue
            if sent.shape.is_follower:
                self._held[first].append((number, sent))
            else:
                yield self._noted(first, sent, self._request(number, sent))

    def released(self, event: Event) -> Iterator[Request]:
        """Yield the requests that wait for an answer that ends with this event."""
        if not self._answering or not isinstance(event, TokensProduced):
            return
        for request_id, token_id, finish_reason, _ in event.tokens:
            answering = self._answering.get(request_id)
            if answering is None:
                continue
            answering.token_ids.append(token_id)
            if finish_reason is not None:
                del self._answering[request_id]
                if not self._is_over():
                    yield from self._next(answering, event.time)

    def _next(self, before: _Answering, time: float) -> Iterator[Request]:
        held = self._held[before.first]
        if not held:  # the load ends inside the session
            return
        number, sent = held.popleft()
        due = replace(sent, arrival_time=time + sent.shape.think_time)
        beginning = array("i", before.request.prompt_token_ids)
        beginning.extend(before.token_ids)
        yield self._noted(before.first, sent, self._request(number, due, beginning))

    def _request(self, number: int, sent: WorkloadRequest, before: "array[int] | None" = None) -> Request:
        request = request_of(number, sent, self._limits_of, before)
        declared = self._load.declared_tokens
        if declared <= sent.num_output_tokens:
            return request
        self.output_lengths[request.request_id] = sent.num_output_tokens
        return replace(request, sampling_params=SamplingParams(max_tokens=declared))

    def _noted(self, first: int, sent: WorkloadRequest, request: Request) -> Request:
        """Return a request, noted if a turn waits for its answer."""
        if sent.shape.is_followed:
            self._answering[request.request_id] = _Answering(first, request)
        return request


def is_admissible(sent: WorkloadRequest, cluster: SimulatedCluster, declared_tokens: int = 0) -> bool:
    """Return whether its KV can ever fit, if it declares this many; the last output token needs none."""
    num_output_tokens = max(sent.num_output_tokens, declared_tokens)
    return sent.num_prompt_tokens + num_output_tokens - 1 <= cluster.max_request_tokens


def request_of(
    number: int, sent: WorkloadRequest, limits_of: LimitsOf, before: "array[int] | None" = None
) -> Request:
    """Return the request of a workload's entry, with the targets of its limits as its SLO.

    `before` has the prompt and the answer of the turn before, if there is one.
    """
    targets = limits_of(sent.num_prompt_tokens).targets(sent.num_prompt_tokens)
    return Request(
        request_id_of(number),
        _prompt(sent.shape, before),
        SamplingParams(max_tokens=sent.num_output_tokens),
        SLO(*targets),
        sent.shape.user,
        arrival_time=sent.arrival_time,
    )


def request_id_of(number: int) -> RequestId:
    """Return an id; ids sort in the order of the load."""
    return f"r{number:06}"


def _prompt(shape: RequestShape, before: "array[int] | None") -> "array[int]":
    """Return the token ids, of a vocabulary in which different runs are different tokens."""
    prompt = array("i") if before is None else before
    for run in shape.new_runs:
        drawn = np.random.PCG64(run.seed).random_raw(-(-run.num_tokens // 2))  # quicker than bounded integers
        prompt.frombytes((drawn.view(np.int32)[: run.num_tokens] & MAX_TOKEN_ID).tobytes())
    return prompt
