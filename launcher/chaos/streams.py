"""Requests whose outputs are compared: sent, streamed, and recorded token by token."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from loong.core.request import TokenId
from loong.foreign_json import NOT_JSON
from loong.launcher.chaos.prompts import Prompt
from loong.workloads.client.connections import ConnectionPool
from loong.workloads.client.http_response import HTTPFormatError
from loong.workloads.client.sse import EventDecoder

PATH = "/v1/completions"
_REQUEST_ID = re.compile(r"\bcmpl-[0-9a-f]+\b")


class Ending(Enum):
    """The end of a stream: its last event, an error with a reason, neither, or an interrupt of this run."""

    COMPLETE = "complete"
    FAILED = "failed"
    LOST = "lost"
    CUT_OFF = "cut off"


@dataclass(slots=True)
class StreamRecord:
    """A stream of the output of a prompt. Times are seconds of the run; each token has one."""

    prompt_index: int
    sent_at: float
    token_ids: list[TokenId] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    ending: Ending | None = None  # None: it is open
    reason: str = ""

    def end(self, ending: Ending, reason: str = "") -> None:
        """Record the end, unless it has ended before."""
        if self.ending is None:
            self.ending, self.reason = ending, reason


class _Choice(msgspec.Struct):
    token_ids: list[TokenId] = []


class _Error(msgspec.Struct):
    message: str = "no message"
    code: str = ""

    def __str__(self) -> str:
        """Return it without the id of the request, so that equal errors have equal texts."""
        message = _REQUEST_ID.sub("...", self.message)
        return f"{self.code}: {message}" if self.code else message


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


class StreamClient:
    """Streams greedy outputs from one server. `now` is the clock of the records."""

    def __init__(self, pool: ConnectionPool, model: str, timeout: float, now: Callable[[], float]) -> None:
        self._pool, self._model, self._timeout, self.now = pool, model, timeout, now

    async def follow(self, prompt: Prompt, record: StreamRecord) -> None:
        """Send a prompt, and record its output until it ends. A failure is recorded, never raised."""
        body = {
            "model": self._model,
            "prompt": prompt.token_ids,
            "max_tokens": prompt.num_output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "return_token_ids": True,
        }
        decoder = EventDecoder()

        def receive(received: bytes) -> bool:
            for event in decoder.feed(received):
                self._take(event, record)
            return False

        try:
            async with asyncio.timeout(self._timeout):
                post = self._pool.request(PATH, msgspec.json.encode(body))
                status, text = await self._pool.post(post, receive)
            if status != 200:
                record.end(Ending.FAILED, _refusal(status, text))
            record.end(Ending.LOST, "the stream ended before its last event")
        except TimeoutError:
            record.end(Ending.LOST, f"no end within {self._timeout:g} s")
        except asyncio.CancelledError:
            record.end(Ending.CUT_OFF)
            raise
        except (HTTPFormatError, OSError, *NOT_JSON) as error:
            record.end(Ending.LOST, f"{type(error).__name__}: {error}")

    def _take(self, event: str, record: StreamRecord) -> None:
        if event == "[DONE]":
            record.end(Ending.COMPLETE)
            return
        found = _decode_event(event)
        if found.error is not None:
            record.end(Ending.FAILED, str(found.error))
        for choice in found.choices:
            record.token_ids += choice.token_ids
            record.token_times += [self.now()] * len(choice.token_ids)


def _refusal(status: int, text: str) -> str:
    try:
        return f"{status} {_decode_event(text).error}"
    except NOT_JSON:
        return f"HTTP {status}"
