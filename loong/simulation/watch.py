"""The clients' view of a simulated run: when tokens came, and which requests missed their SLO."""

import heapq
from array import array
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import inf
from typing import TypeAlias

from loong.core.events import Event, RequestArrived, TokensProduced
from loong.core.request import SLO, Request, RequestId
from loong.workloads.metrics.backlog import backlog_of, deadline_of
from loong.workloads.metrics.misses import Misses

TokenTimes: TypeAlias = "array[float]"


class Watch:
    """Detects a miss as soon as it is certain: when a first token, or all, can no longer come in time.

    Only `measured` requests are watched; None is all of them. More misses than allowed make a run hopeless.
    Given the `works` of all measured requests (device seconds), a backlog that has grown when all have
    arrived makes it hopeless as well. `token_times` are in virtual seconds.
    """

    def __init__(
        self,
        misses: Misses | None = None,
        measured: Collection[RequestId] | None = None,
        works: Mapping[RequestId, float] | None = None,
    ) -> None:
        self.token_times: dict[RequestId, TokenTimes] = {}
        self.num_events = 0
        self.is_unstable = False
        self._misses = misses or Misses()
        self._measured = None if measured is None else frozenset(measured)
        self._works = works
        self._undecided = set(self._measured or ())
        self._requests: dict[RequestId, Request] = {}
        self._arrivals: list[float] = []
        self._finishes: dict[RequestId, float] = {}
        self._deadlines: list[tuple[float, RequestId, int]] = []  # and how many tokens are due
        self._missed: set[RequestId] = set()

    @property
    def is_hopeless(self) -> bool:
        """Return whether too many have missed, or the backlog grows."""
        return self.is_unstable or self._misses.is_hopeless

    @property
    def is_decided(self) -> bool:
        """Return whether every measured request, if they were named, has ended or missed."""
        return not self._undecided

    def arrival_time(self, request_id: RequestId, default: float) -> float:
        """Return when a request arrived, or `default` if it has not."""
        request = self._requests.get(request_id)
        return default if request is None else request.arrival_time

    def take(self, event: Event) -> None:
        """Process an event."""
        self.num_events += 1
        while self._deadlines and self._deadlines[0][0] < event.time:
            _, request_id, num_due = heapq.heappop(self._deadlines)
            if request_id not in self._finishes and len(self.token_times[request_id]) < num_due:
                self._miss(request_id)
        if self._works and len(self._arrivals) == len(self._works) and event.time > self._arrivals[-1]:
            self._judge_backlog(self._works, event.time)
        if isinstance(event, TokensProduced):
            for request_id, _, finish_reason, _ in event.tokens:
                times = self.token_times.get(request_id)
                if times is not None:
                    times.append(event.time)
                    if len(times) == 1:
                        self._begin(request_id, event.time)
                    if finish_reason is not None:
                        self._end(request_id, times)
        elif isinstance(event, RequestArrived):
            self._arrive(event)

    def _arrive(self, event: RequestArrived) -> None:
        request_id, slo = event.request.request_id, event.request.slo
        if self._measured is not None and request_id not in self._measured:
            return
        self.token_times[request_id] = array("d")
        prompt = range(len(event.request.prompt_token_ids))  # its tokens would take memory to the end
        self._requests[request_id] = replace(event.request, prompt_token_ids=prompt)
        self._arrivals.append(event.time)
        if slo is not None and slo.ttft is not None:
            heapq.heappush(self._deadlines, (event.time + slo.ttft, request_id, 1))

    def _begin(self, request_id: RequestId, time: float) -> None:
        request = self._requests[request_id]
        num_tokens, slo = request.sampling_params.max_tokens, request.slo
        if slo is not None and slo.tpot is not None:
            heapq.heappush(self._deadlines, (time + slo.tpot * (num_tokens - 1), request_id, num_tokens))

    def _end(self, request_id: RequestId, times: TokenTimes) -> None:
        self._undecided.discard(request_id)
        self._finishes[request_id] = times[-1]
        slo = self._requests[request_id].slo
        tpot = None if slo is None else slo.tpot
        if tpot is not None and times[-1] - times[0] > tpot * (len(times) - 1):
            self._miss(request_id)

    def _miss(self, request_id: RequestId) -> None:
        self._undecided.discard(request_id)
        if request_id not in self._missed:
            self._missed.add(request_id)
            self._misses.add(len(self._requests[request_id].prompt_token_ids))

    def _judge_backlog(self, works: Mapping[RequestId, float], now: float) -> None:
        """Compare the backlog, once, before anything that happens after the last arrival."""
        self._works = None
        finishes = [self._finishes.get(request_id, inf) for request_id in self._requests]
        ordered = [works[request_id] for request_id in self._requests]
        deadlines = [
            _deadline(time, request)
            for time, request in zip(self._arrivals, self._requests.values(), strict=True)
        ]
        backlog = backlog_of(self._arrivals, finishes, ordered, now, deadlines)
        self.is_unstable = backlog.is_stable is False


def _deadline(arrival_time: float, request: Request) -> float:
    slo = request.slo or SLO()
    ttft, tpot = (inf if bound is None else bound for bound in (slo.ttft, slo.tpot))
    return deadline_of(arrival_time, ttft, tpot, request.sampling_params.max_tokens)
