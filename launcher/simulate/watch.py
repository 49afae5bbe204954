"""What a client would note of a run: when tokens came, and who has missed their SLO."""

import heapq
from array import array
from typing import TypeAlias

from loong.core.events import Event, ProducedToken, RequestArrived, TokensProduced
from loong.core.request import SLO, RequestId

TokenTimes: TypeAlias = "array[float]"


class Watch:
    """Knows of a miss as soon as it is certain: at the deadline of a first token, at the end for the others.

    `token_times` are in virtual seconds. More than `max_misses` make a run hopeless.
    """

    def __init__(self, max_misses: float) -> None:
        self.token_times: dict[RequestId, TokenTimes] = {}
        self.num_events = 0
        self._max_misses = max_misses
        self._slos: dict[RequestId, SLO] = {}
        self._deadlines: list[tuple[float, RequestId]] = []
        self._missed: set[RequestId] = set()

    @property
    def is_hopeless(self) -> bool:
        """Whether too many have missed."""
        return len(self._missed) > self._max_misses

    def take(self, event: Event) -> None:
        """Take in what has happened."""
        self.num_events += 1
        while self._deadlines and self._deadlines[0][0] < event.time:
            _, request_id = heapq.heappop(self._deadlines)
            if not self.token_times[request_id]:
                self._missed.add(request_id)
        if isinstance(event, TokensProduced):
            for token in event.tokens:
                self._note(token, event.time)
        elif isinstance(event, RequestArrived):
            request_id, slo = event.request.request_id, event.request.slo
            self.token_times[request_id] = array("d")
            if slo is not None:
                self._slos[request_id] = slo
                heapq.heappush(self._deadlines, (event.time + slo.ttft, request_id))

    def _note(self, token: ProducedToken, time: float) -> None:
        times = self.token_times[token.request_id]
        times.append(time)
        if token.finish_reason is not None and token.request_id in self._slos:
            tpot = self._slos[token.request_id].tpot
            if times[-1] - times[0] > tpot * (len(times) - 1):
                self._missed.add(token.request_id)
