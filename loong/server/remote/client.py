"""The engine client for an engine in another process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import count
from socket import socket
from typing import assert_never

from loong.core.errors import (
    ClusterError,
    EngineStoppedError,
    InvalidRequestError,
    LoongError,
    RequestFailedError,
)
from loong.core.request import FinishReason, NewRequest, RequestId
from loong.engine.client import EngineLimits, PutToken, RequestLoad
from loong.messages.wire import encode
from loong.server.api.errors import ApiError
from loong.server.remote.channel import RemoteChannel
from loong.server.remote.messages import (
    Abort,
    Admit,
    Admitted,
    Call,
    Failed,
    FoundCached,
    Leave,
    Listening,
    NewLimits,
    NoteParent,
    Ping,
    Pong,
    Produced,
    Refused,
    Scored,
    StopListening,
    Submit,
    decode_notice,
)


class RemoteEngineClient:
    """An `EngineClient` over a channel to an `ApiConnection`, which reports changed limits.

    `report_limit` is called when it does, first when the engine can take requests.
    """

    def __init__(self, limits: EngineLimits, report_limit: Callable[[], None] = lambda: None) -> None:
        self.limits, self.report_limit = limits, report_limit
        self.num_pings = 0  # of the engine's process, which show that it is alive
        self.stop_listening = asyncio.Event()  # set on StopListening, and at the end
        self.ended = asyncio.Event()  # the engine's process has closed the channel, or died
        self._channel = RemoteChannel(self._take, self._end)
        self._puts: dict[RequestId, PutToken] = {}  # choices that have not ended
        self._admissions: dict[int, asyncio.Future[None]] = {}  # by ticket
        self._tickets = count()

    async def open(self, end: socket) -> None:
        """Start to exchange messages on one end of a pair of sockets."""
        await self._channel.open(end)

    def close(self) -> None:
        """Close the channel, which aborts all requests in flight."""
        self._channel.close()

    def abandon(self) -> None:
        """Close the channel at once, because the engine's process does not answer."""
        self._channel.abort()

    def report_listening(self) -> None:
        """Report that this process answers clients."""
        self._call(Listening())

    @asynccontextmanager
    async def admit(self, load: RequestLoad) -> AsyncIterator[None]:
        """Count requests in the engine's process while the context lasts."""
        if self.ended.is_set():
            raise EngineStoppedError
        ticket = next(self._tickets)
        answer = self._admissions[ticket] = asyncio.get_running_loop().create_future()
        self._call(Admit(ticket, load))
        try:
            await answer
            yield
        finally:
            self._admissions.pop(ticket, None)
            self._call(Leave(ticket))

    def submit(self, request: NewRequest, put: PutToken) -> None:
        """Begin a request."""
        if self.ended.is_set():
            put(EngineStoppedError())
            return
        self._puts.update(dict.fromkeys(request.choice_ids, put))
        self._call(Submit(request))

    def abort(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        """Abort one choice of a request unless it has ended."""
        if self._puts.pop(request_id, None) is not None:
            self._call(Abort(request_id, reason))

    def note_parent(self, request_id: RequestId, traceparent: str) -> None:
        """Record the parent of the request's span."""
        self._call(NoteParent(request_id, traceparent))

    def _call(self, call: Call) -> None:
        if not self.ended.is_set():
            self._channel.send(encode(call))

    def _take(self, frame: bytes) -> None:
        notice = decode_notice(frame)
        match notice:
            case Produced():
                for token in notice.tokens:
                    if (put := self._puts.get(token.request_id)) is not None:
                        if token.finish_reason is not None:
                            del self._puts[token.request_id]
                        put(token)
            case Scored():
                if (put := self._puts.get(notice.request_id)) is not None:
                    put(notice.logprobs)
            case FoundCached():
                if (put := self._puts.get(notice.cached.request_id)) is not None:
                    put(notice.cached)
            case Admitted():
                self._answer(notice.ticket, None)
            case Refused():
                t = notice
                self._answer(t.ticket, ApiError(t.status, t.message, t.code, t.param, t.headers))
            case Failed():
                self._fail(notice.request_ids, _error_of(notice))
            case Ping():
                self.num_pings += 1
                self._call(Pong())
            case NewLimits():
                self.limits = notice.limits
                self.report_limit()
            case StopListening():
                self.stop_listening.set()
            case _:
                assert_never(notice)

    def _answer(self, ticket: int, error: ApiError | ClusterError | None) -> None:
        answer = self._admissions.pop(ticket, None)
        if answer is None or answer.done():
            return  # its client has left
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)

    def _fail(self, request_ids: Iterable[RequestId], error: LoongError) -> None:
        for request_id in request_ids:
            if (put := self._puts.pop(request_id, None)) is not None:
                put(error)

    def _end(self) -> None:
        self.ended.set()
        self.stop_listening.set()
        self._fail(tuple(self._puts), EngineStoppedError())
        for ticket in tuple(self._admissions):
            self._answer(ticket, EngineStoppedError())


def _error_of(failed: Failed) -> LoongError:
    if failed.reason is None:
        return EngineStoppedError()
    if failed.code is not None:
        return RequestFailedError(failed.reason, failed.code)
    return InvalidRequestError(failed.reason) if failed.is_invalid else ClusterError(failed.reason)
