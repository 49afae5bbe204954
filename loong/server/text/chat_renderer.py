"""Renders chat templates in processes of their own, bounded in time and memory."""

import asyncio
from collections.abc import Iterable

from loong.core.errors import ConfigError, InvalidRequestError
from loong.server.api.errors import ApiError
from loong.server.bounded_processes import BoundedProcesses, ProcessEndedError
from loong.server.text.chat_template import ChatTemplate
from loong.server.text.template_process import Outcome

MAX_SECONDS = 5.0  # for one conversation
MAX_WAITING_BYTES = 2**28
_QUICK_SECONDS = 0.25
_LONG_TEXT = 2**16  # bytes; more are decoded in a thread
_PROCESS = "loong.server.text.template_process"
_SHORTEST = [{"role": "user", "content": "hi"}]


class ChatRenderer:
    """Writes the prompts of conversations.

    Nearly all take less than a millisecond. One that is not so quick is begun again among the slow ones, so
    that it holds up no other for long.
    """

    def __init__(self, max_seconds: float = MAX_SECONDS) -> None:
        self.max_seconds = max_seconds
        self._num_bytes = 0  # of all requests that are not answered
        self._quick = BoundedProcesses(_PROCESS, most=2)
        self._slow = BoundedProcesses(_PROCESS, most=2)

    async def render(self, request: bytes) -> str:
        """Return the text of a template's request.

        Raises `InvalidRequestError` if the template refuses the messages, or exceeds a bound.
        """
        outcome, text = await self.answer(request)
        if outcome is Outcome.TEXT:
            return text
        raise refusal(text)

    async def answer(self, request: bytes) -> tuple[Outcome, str]:
        """Return the outcome of a request, and the text or the reason why there is none.

        Raises a 503 if too many wait.
        """
        if self._num_bytes and self._num_bytes + len(request) > MAX_WAITING_BYTES:
            message = f"{MAX_WAITING_BYTES} bytes of chats wait for the chat template; come back later"
            raise ApiError(503, message, "queue_full")
        self._num_bytes += len(request)
        try:
            return await self._answer(request)
        finally:
            self._num_bytes -= len(request)

    async def close(self) -> None:
        """End all processes."""
        await self._quick.close()
        await self._slow.close()

    async def _answer(self, request: bytes) -> tuple[Outcome, str]:
        quick_seconds = min(_QUICK_SECONDS, self.max_seconds)
        try:
            try:
                answer = await self._quick.ask(request, quick_seconds)
            except TimeoutError:
                answer = await self._slow.ask(request, self.max_seconds)
        except TimeoutError:
            return Outcome.EXCEEDED, f"it takes more than {self.max_seconds:g} s"
        except ProcessEndedError:
            return Outcome.EXCEEDED, "it takes too much memory"
        if len(answer) <= _LONG_TEXT:
            return _read(answer)
        return await asyncio.to_thread(_read, answer)


async def try_templates(templates: Iterable[ChatTemplate | None], max_seconds: float = MAX_SECONDS) -> None:
    """Raise `ConfigError` if one does not compile, or exceeds a bound even with the shortest conversation."""
    renderer = ChatRenderer(max_seconds)
    try:
        for template in filter(None, templates):
            outcome, why = await renderer.answer(template.compile_request())
            if outcome is not Outcome.TEXT:
                raise ConfigError(f"the model's chat template does not compile: {why}")
            outcome, why = await renderer.answer(template.request(_SHORTEST))
            if outcome is Outcome.EXCEEDED:
                raise ConfigError(f"the model's chat template cannot be used: {why}")
    finally:
        await renderer.close()


def refusal(why: str) -> InvalidRequestError:
    """Return the error of a conversation that a template does not take."""
    return InvalidRequestError(f"the model's chat template refuses these messages: {why}", param="messages")


def _read(answer: bytes) -> tuple[Outcome, str]:
    return Outcome(answer[0]), str(memoryview(answer)[1:], "utf-8")
