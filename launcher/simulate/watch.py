"""What clients would note of a run: when tokens came, and who has missed their SLO."""

import heapq
from array import array
from collections.abc import Collection
from typing import TypeAlias

from loong.core.events import Event, RequestArrived, TokensProduced
from loong.core.request import SLO, RequestId

TokenTimes: TypeAlias = "array[float]"


class Watch:
    """Knows of a miss as soon as it is certain: at the deadline of a first token, at the end for the others.

    Only requests that are `measured` are looked at; None is all of them. More than `max_misses` make a run
    hopeless. `token_times` are in virtual seconds.
    """

    def __init__(self, max_misses: float, measured: Collection[RequestId] | None = None) -> None:
        self.token_times: dict[RequestId, TokenTimes] = {}
        self.num_events = 0
        self._max_misses = max_misses
        self._measured = None if measured is None else frozenset(measured)
        self._undecided = set(self._measured or ())
        self._slos: dict[RequestId, SLO] = {}
        self._deadlines: list[tuple[float, RequestId]] = []
        self._missed: set[RequestId] = set()

    @property
    def is_hopeless(self) -> bool:
        """Whether too many have missed."""
        return len(self._missed) > self._max_misses

    @property
    def is_decided(self) -> bool:
        """Whether every request that is measured, if they were named, has ended or missed."""
        return not self._undecided

    def take(self, event: Event) -> None:
        """Take in what has happened."""
        self.num_events += 1
        while self._deadlines and self._deadlines[0][0] < event.time:
            _, request_id = heapq.heappop(self._deadlines)
            if not self.token_times[request_id]:
                self._miss(request_id)
        if isinstance(event, TokensProduced):
            for request_id, _, finish_reason, _ in event.tokens:
                times = self.token_times.get(request_id)
                if times is not None:
                    times.append(event.time)
                    if finish_reason is not None:
                        self._end(request_id, times)
        elif isinstance(event, RequestArrived):
            self._arrive(event)

    def _arrive(self, event: RequestArrived) -> None:
        request_id, slo = event.request.request_id, event.request.slo
        if self._measured is not None and request_id not in self._measured:
            return
        self.token_times[request_id] = array("d")
        if slo is None:
            return
        self._slos[request_id] = slo
        if slo.ttft is not None:
            heapq.heappush(self._deadlines, (event.time + slo.ttft, request_id))

    def _end(self, request_id: RequestId, times: TokenTimes) -> None:
        self._undecided.discard(request_id)
        slo = self._slos.get(request_id)
        tpot = None if slo is None else slo.tpot
        if tpot is not None and times[-1] - times[0] > tpot * (len(times) - 1):
            self._miss(request_id)

    def _miss(self, request_id: RequestId) -> None:
        self._missed.add(request_id)
        self._undecided.discard(request_id)
