"""When requests came, had their first token and ended: for people to look at."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from loong.core.events import Event, RequestAborted, RequestArrived, TokensProduced
from loong.core.latest import Latest
from loong.core.request import FinishReason, RequestId

MAX_SPAN_BYTES = 2**23  # of the spans that are kept of requests that are over
_SPAN_BYTES = 320  # of a span without the letters of its id


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """A request from its arrival to its end; times are the executor's, None for what has not happened.

    `end` is the value of a `FinishReason`.
    """

    request_id: RequestId
    num_prompt_tokens: int
    arrived_at: float
    first_token_at: float | None = None
    ended_at: float | None = None
    end: str | None = None

    def moved_by(self, seconds: float) -> "RequestSpan":
        """Return the span on a clock that shows `seconds` more."""
        first, ended = self.first_token_at, self.ended_at
        return replace(
            self,
            arrived_at=self.arrived_at + seconds,
            first_token_at=None if first is None else first + seconds,
            ended_at=None if ended is None else ended + seconds,
        )


class RequestSpans:
    """The last requests, followed event by event."""

    def __init__(self, max_bytes: int = MAX_SPAN_BYTES) -> None:
        self._live: dict[RequestId, RequestSpan] = {}
        self._ended = Latest(max_bytes, _size_of_span)

    def on_event(self, event: Event) -> None:
        """Follow an event; those that are of no request change nothing."""
        if isinstance(event, TokensProduced):
            for token in event.tokens:
                self._see_token(event.time, token.request_id, token.finish_reason)
        elif isinstance(event, RequestArrived):
            for choice in event.request.choices():
                span = RequestSpan(choice.request_id, len(choice.prompt_token_ids), choice.arrival_time)
                self._live[choice.request_id] = span
        elif isinstance(event, RequestAborted):
            self._finish(event.time, event.request_id, FinishReason.ABORT)

    def failed(self, time: float, request_ids: Iterable[RequestId]) -> None:
        """End the requests that a plan gave up."""
        for request_id in request_ids:
            self._finish(time, request_id, FinishReason.ERROR)

    def spans(self) -> tuple[RequestSpan, ...]:
        """Return those that have ended, in that order, and then those that have not."""
        return (*self._ended, *self._live.values())

    def _see_token(self, time: float, request_id: RequestId, reason: FinishReason | None) -> None:
        span = self._live.get(request_id)
        if span is None:
            return  # its client left; its batch goes on to the step boundary
        if span.first_token_at is None:
            self._live[request_id] = replace(span, first_token_at=time)
        if reason is not None:
            self._finish(time, request_id, reason)

    def _finish(self, time: float, request_id: RequestId, reason: FinishReason) -> None:
        if (span := self._live.pop(request_id, None)) is not None:
            self._ended.append(replace(span, ended_at=time, end=reason.value))


def _size_of_span(span: RequestSpan) -> int:
    return _SPAN_BYTES + len(span.request_id)
