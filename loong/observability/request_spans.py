"""The arrival, first token and end of the last requests, for views."""

from collections.abc import Iterable
from dataclasses import replace

from loong.core.cluster_history import RequestSpan
from loong.core.events import Event, RequestAborted, RequestArrived, TokensProduced
from loong.core.request import FinishReason, RequestId
from loong.observability.latest import Latest

MAX_SPAN_BYTES = 2**23  # of the spans of ended requests
_SPAN_BYTES = 320  # of a span, apart from its id


class RequestSpans:
    """The last requests, updated by each event."""

    def __init__(self, max_bytes: int = MAX_SPAN_BYTES) -> None:
        self._live: dict[RequestId, RequestSpan] = {}
        self._ended = Latest(max_bytes, _size_of_span)

    def on_event(self, event: Event) -> None:
        """Update the spans by an event. Events of no request have no effect."""
        if isinstance(event, TokensProduced):
            for token in event.tokens:
                self._see_token(event.time, token.request_id, token.finish_reason)
        elif isinstance(event, RequestArrived):
            request = event.request
            for choice_id in request.choice_ids:
                span = RequestSpan(choice_id, len(request.prompt_token_ids), request.arrival_time)
                self._live[choice_id] = span
        elif isinstance(event, RequestAborted):
            self._finish(event.time, event.request_id, event.reason)

    def failed(self, time: float, request_ids: Iterable[RequestId]) -> None:
        """End the requests that a plan failed."""
        for request_id in request_ids:
            self._finish(time, request_id, FinishReason.ERROR)

    def is_live(self, request_id: RequestId) -> bool:
        """Return whether a request has arrived and not ended."""
        return request_id in self._live

    def spans(self) -> tuple[RequestSpan, ...]:
        """Return the ended requests in the order of their ends, then the others."""
        return (*self._ended, *self._live.values())

    def _see_token(self, time: float, request_id: RequestId, reason: FinishReason | None) -> None:
        span = self._live.get(request_id)
        if span is None:
            return  # it was aborted; its batch continues to the step boundary
        if span.first_token_at is None:
            self._live[request_id] = replace(span, first_token_at=time)
        if reason is not None:
            self._finish(time, request_id, reason)

    def _finish(self, time: float, request_id: RequestId, reason: FinishReason) -> None:
        if (span := self._live.pop(request_id, None)) is not None:
            self._ended.append(replace(span, ended_at=time, end=reason))


def _size_of_span(span: RequestSpan) -> int:
    return _SPAN_BYTES + len(span.request_id)
