"""The engine of another process, for those who answer requests in this one."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import count
from socket import socket
from typing import assert_never

from loong.core.errors import ClusterError, EngineStoppedError
from loong.core.request import Request, RequestId
from loong.engine.client import Asking, EngineLimits, PutToken
from loong.server.api.errors import ApiError
from loong.server.remote.channel import RemoteChannel
from loong.server.remote.messages import (
    Abort,
    Admit,
    Admitted,
    AreYouThere,
    Call,
    Failed,
    Here,
    Leave,
    Listening,
    NoteParent,
    Produced,
    Refused,
    Scored,
    StopListening,
    Submit,
    decode_tidings,
)
from loong.wire import encode


class RemoteEngineClient:
    """An `EngineClient` over a channel to an `ApiConnection`."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.stop_listening = asyncio.Event()  # told so, or ended
        self.ended = asyncio.Event()  # the engine's process has closed the channel, or died
        self._channel = RemoteChannel(self._take, self._end)
        self._puts: dict[RequestId, PutToken] = {}  # for choices that have not ended
        self._asking: dict[int, asyncio.Future[None]] = {}  # by ticket
        self._tickets = count()

    async def open(self, end: socket) -> None:
        """Begin to talk, on one end of a pair of sockets."""
        await self._channel.open(end)

    def close(self) -> None:
        """Stop talking; whatever is in flight is aborted."""
        self._channel.close()

    def tell_listening(self) -> None:
        """Tell that clients are answered from now on."""
        self._call(Listening())

    @asynccontextmanager
    async def admit(self, asking: Asking) -> AsyncIterator[None]:
        """Have requests counted in while the context lasts."""
        if self.ended.is_set():
            raise EngineStoppedError
        ticket = next(self._tickets)
        answer = self._asking[ticket] = asyncio.get_running_loop().create_future()
        self._call(Admit(ticket, asking))
        try:
            await answer
            yield
        finally:
            self._asking.pop(ticket, None)
            self._call(Leave(ticket))

    def submit(self, request: Request, put: PutToken) -> None:
        """Begin a request."""
        if self.ended.is_set():
            put(EngineStoppedError())
            return
        self._puts.update((choice.request_id, put) for choice in request.choices())
        self._call(Submit(request))

    def abort(self, request_id: RequestId) -> None:
        """End one choice of a request, unless it has ended."""
        if self._puts.pop(request_id, None) is not None:
            self._call(Abort(request_id))

    def note_parent(self, request_id: RequestId, traceparent: str) -> None:
        """Remember whose child the request's span is."""
        self._call(NoteParent(request_id, traceparent))

    def _call(self, call: Call) -> None:
        if not self.ended.is_set():
            self._channel.send(encode(call))

    def _take(self, frame: bytes) -> None:
        tidings = decode_tidings(frame)
        match tidings:
            case Produced():
                for token in tidings.tokens:
                    if (put := self._puts.get(token.request_id)) is not None:
                        if token.finish_reason is not None:
                            del self._puts[token.request_id]
                        put(token)
            case Scored():
                if (put := self._puts.get(tidings.request_id)) is not None:
                    put(tidings.logprobs)
            case Admitted():
                self._answer(tidings.ticket, None)
            case Refused():
                t = tidings
                self._answer(t.ticket, ApiError(t.status, t.message, t.code, t.param, t.headers))
            case Failed():
                reason = tidings.reason
                error = EngineStoppedError() if reason is None else ClusterError(reason)
                self._fail(tidings.request_ids, error)
            case AreYouThere():
                self._call(Here())
            case StopListening():
                self.stop_listening.set()
            case _:
                assert_never(tidings)

    def _answer(self, ticket: int, error: ApiError | ClusterError | None) -> None:
        answer = self._asking.pop(ticket, None)
        if answer is None or answer.done():
            return  # nobody waits for it any more
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)

    def _fail(self, request_ids: Iterable[RequestId], error: ClusterError) -> None:
        for request_id in request_ids:
            if (put := self._puts.pop(request_id, None)) is not None:
                put(error)

    def _end(self) -> None:
        self.ended.set()
        self.stop_listening.set()
        self._fail(tuple(self._puts), EngineStoppedError())
        for ticket in tuple(self._asking):
            self._answer(ticket, EngineStoppedError())
