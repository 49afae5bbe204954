"""How an answer is sent: whole, or as a stream of the same text."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from aiohttp import web

from loong.core.errors import LoongError
from loong.core.request import Request, TokenId
from loong.server.context import Server
from loong.server.errors import as_api_error
from loong.server.output import Delta
from loong.server.schemas import StreamOptions
from loong.server.sse import EventStream
from loong.server.tokenizer import Tokenizer
from loong.server.wire import json_response

Json: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the shape of an answer depends on."""

    request: Request
    model: str
    created: int  # Unix time, seconds
    return_token_ids: bool
    stream_options: StreamOptions


class AnswerShape(ABC):
    """The JSON of one endpoint's answers."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, asked: Asked, tokenizer: Tokenizer) -> None:
        self.asked = asked
        self.tokenizer = tokenizer

    @abstractmethod
    def whole(self, deltas: Sequence[Delta]) -> Json:
        """The whole answer."""

    @abstractmethod
    def chunks(self, delta: Delta) -> Iterator[Json]:
        """The events of a stream that tell one token."""

    def usage_chunk(self, num_output_tokens: int) -> Json:
        """The event that tells the counts at the end of a stream."""
        return self.envelope(self.chunk_object, []) | {"usage": self.usage(num_output_tokens)}

    def envelope(self, kind: str, choices: Sequence[Json]) -> Json:
        """What stands around the choices."""
        return {
            "id": self.asked.request.request_id,
            "object": kind,
            "created": self.asked.created,
            "model": self.asked.model,
            "choices": choices,
        }

    def chunk_envelope(self, choice: Json, num_output_tokens: int) -> Json:
        """What stands around the one choice of a chunk, counts included where they were asked for."""
        chunk = self.envelope(self.chunk_object, [choice])
        options = self.asked.stream_options
        if options.continuous_usage_stats:
            chunk["usage"] = self.usage(num_output_tokens)
        elif options.include_usage:
            chunk["usage"] = None
        return chunk

    def usage(self, num_output_tokens: int) -> Json:
        """Counts of tokens."""
        num_prompt_tokens = len(self.asked.request.prompt_token_ids)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
        }

    def token_ids(self, deltas: Sequence[Delta]) -> Json:
        """The ids of the tokens told, if they were asked for."""
        return {"token_ids": [delta.token_id for delta in deltas]} if self.asked.return_token_ids else {}

    def prompt_token_ids(self) -> Json:
        """The ids of the prompt, if ids were asked for."""
        ids: Sequence[TokenId] = self.asked.request.prompt_token_ids
        return {"prompt_token_ids": ids} if self.asked.return_token_ids else {}


def finish_fields(delta: Delta) -> Json:
    """Why the answer ends with this token, if it does."""
    reason = delta.finish_reason
    return {"finish_reason": reason.value if reason else None, "stop_reason": delta.stop_reason}


async def send_whole(shape: AnswerShape, deltas: AsyncGenerator[Delta, None]) -> web.Response:
    """Wait for the whole answer, then send it."""
    async with aclosing(deltas):
        return json_response(shape.whole([delta async for delta in deltas]))


async def send_stream(
    http: web.Request, server: Server, shape: AnswerShape, deltas: AsyncGenerator[Delta, None]
) -> web.StreamResponse:
    """Send the answer as it grows; what fails from here on is an event of the stream."""
    stream = EventStream(server.settings)
    num_output_tokens = 0
    async with aclosing(deltas), stream.open(http):
        try:
            async for delta in deltas:
                num_output_tokens = delta.index + 1
                for chunk in shape.chunks(delta):
                    await stream.send(chunk)
            if shape.asked.stream_options.include_usage:
                await stream.send(shape.usage_chunk(num_output_tokens))
        except LoongError as error:
            await stream.send(as_api_error(error).body)
    return stream.response
