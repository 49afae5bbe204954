"""The engine's side of the channel to one API process."""

import asyncio
import logging
from contextlib import ExitStack, suppress
from dataclasses import replace
from socket import socket
from typing import assert_never

from loong.core.cached_tokens import CachedTokens
from loong.core.errors import EngineStoppedError, InvalidRequestError, LoongError, RequestFailedError
from loong.core.events import ProducedToken
from loong.core.prompt_logprobs import PromptLogprobs
from loong.core.request import NewRequest, RequestId
from loong.engine.client import Answered, EngineClient
from loong.messages.wire import encode
from loong.server.admission import Admission
from loong.server.api.errors import ApiError, as_api_error
from loong.server.remote.channel import RemoteChannel
from loong.server.remote.messages import (
    Abort,
    Admit,
    Admitted,
    Failed,
    FoundCached,
    Leave,
    Listening,
    NewLimits,
    NoteParent,
    Notice,
    Ping,
    Pong,
    Produced,
    Refused,
    Scored,
    StopListening,
    Submit,
    decode_call,
)

logger = logging.getLogger(__name__)

ASK_SECONDS = 5.0
MAX_UNANSWERED = 6
MAX_UNSENT_BYTES = 2**26  # bound on the engine's memory for a process that does not read


class ApiConnection:
    """Carries out the calls of an API process, and reports the results.

    All requests of a process that ends are aborted. The tokens of one turn of the event loop share a frame.
    """

    def __init__(self, engine: EngineClient, admission: Admission) -> None:
        self.is_listening, self.has_ended = asyncio.Event(), asyncio.Event()
        self._engine, self._admission = engine, admission
        self._channel = RemoteChannel(self._take, self._end)
        self._admitted: dict[int, ExitStack] = {}  # by ticket
        self._open: set[RequestId] = set()  # choices that have not ended
        self._tokens: list[ProducedToken] = []
        self._num_unanswered = 0

    async def open(self, end: socket) -> None:
        """Start to exchange messages on one end of a pair of sockets."""
        await self._channel.open(end)
        self.report_limits()  # which may have changed since the process was configured

    async def watch(self) -> None:
        """Ping the process until it ends, and abort the channel when the process no longer answers."""
        while not self.has_ended.is_set():
            if self._num_unanswered >= MAX_UNANSWERED:
                logger.error("an API process did not answer %d pings; its channel is closed", MAX_UNANSWERED)
                self._channel.abort()
                return
            self._num_unanswered += 1  # counts pings, not seconds, because this process may be blocked itself
            self.ping()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.has_ended.wait(), ASK_SECONDS)

    def ping(self) -> None:
        """Ask for an answer, which shows that this process is alive."""
        self._report(Ping())

    def report_limits(self) -> None:
        """Report the present bounds of a request."""
        self._report(NewLimits(self._engine.limits))

    def stop_listening(self) -> None:
        """Make the process refuse new connections."""
        self._report(StopListening())

    def close(self) -> None:
        """Make the process end, by closing the channel."""
        self._channel.close()

    def _report(self, notice: Notice) -> None:
        if not self.has_ended.is_set():
            self._channel.send(encode(notice))

    def _take(self, frame: bytes) -> None:
        call = decode_call(frame)
        match call:
            case Submit():
                self._submit(call.request)
            case Abort():
                self._open.discard(call.request_id)
                self._engine.abort(call.request_id, call.reason)
            case Admit():
                self._admit(call)
            case Leave():
                if (admitted := self._admitted.pop(call.ticket, None)) is not None:
                    admitted.close()
            case NoteParent():
                self._engine.note_parent(call.request_id, call.traceparent)
            case Listening():
                self.is_listening.set()
            case Pong():
                self._num_unanswered = 0
            case _:
                assert_never(call)

    def _admit(self, call: Admit) -> None:
        admitted = ExitStack()
        try:
            admitted.enter_context(self._admission.admit(call.load))
        except (ApiError, EngineStoppedError) as error:
            e = as_api_error(error)
            self._report(Refused(call.ticket, e.status, e.message, e.code, e.param, e.headers))
        else:
            self._admitted[call.ticket] = admitted
            self._report(Admitted(call.ticket))

    def _submit(self, request: NewRequest) -> None:
        self._open.update(request.choice_ids)

        def put(token: Answered) -> None:
            match token:
                case ProducedToken():
                    self._collect(token)
                case PromptLogprobs():
                    self._report(Scored(request.request_id, token))
                case CachedTokens():
                    self._report(FoundCached(token))
                case LoongError():
                    fail(token)

        def fail(token: LoongError) -> None:
            failed = self._open.intersection(request.choice_ids)
            if not failed:
                return  # the failure was reported once for all choices
            self._open -= failed
            self._report_tokens()  # the tokens before the failure
            reason = None if isinstance(token, EngineStoppedError) else str(token)
            code = token.code if isinstance(token, RequestFailedError) else None
            self._report(Failed(tuple(failed), reason, isinstance(token, InvalidRequestError), code))

        prompt = tuple(request.prompt_token_ids)  # decoding gives a list
        self._engine.submit(replace(request, prompt_token_ids=prompt), put)

    def _collect(self, token: ProducedToken) -> None:
        if token.finish_reason is not None:
            self._open.discard(token.request_id)
        if not self._tokens:
            asyncio.get_running_loop().call_soon(self._report_tokens)
        self._tokens.append(token)

    def _report_tokens(self) -> None:
        tokens, self._tokens = self._tokens, []
        if tokens:
            self._report(Produced(tuple(tokens)))
        if not self.has_ended.is_set() and self._channel.num_unsent_bytes > MAX_UNSENT_BYTES:
            logger.error("an API process has left %d bytes unread; its channel is closed", MAX_UNSENT_BYTES)
            self._channel.abort()

    def _end(self) -> None:
        self.has_ended.set()
        for request_id in self._open:
            self._engine.abort(request_id)
        self._open.clear()
        for admitted in self._admitted.values():
            admitted.close()
        self._admitted.clear()
