"""How an answer is sent: whole, or as a stream of the same text."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

import msgspec
from aiohttp import web

from loong.core.request import TokenId
from loong.server.api.json_bodies import json_response
from loong.server.api.sse import OPENAI_STREAM, EventStream, StreamFormat, event_of
from loong.server.context import Server
from loong.server.openai.choices import Choices
from loong.server.openai.output import Delta
from loong.server.openai.schemas import StreamOptions
from loong.server.text.tokenizer import Tokenizer

Json: TypeAlias = dict[str, object]

_LONG_ANSWER = 512  # tokens, of all choices
_SOME_TEXT = "\0some text\0"  # which no name holds


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """What the shape of an answer depends on."""

    answer_id: str
    model: str
    created: int  # Unix time, seconds
    choices: tuple[Choices, ...]  # of each choice, those to the same prompt
    num_prompt_tokens: int  # of all prompts
    return_token_ids: bool
    stream_options: StreamOptions
    num_prompt_logprobs: int | None = None  # of the likeliest tokens, at each position of the prompt
    num_echoed_logprobs: int | None = None  # the same, among the logprobs of an answer that begins with it
    is_prompt_only: bool = False  # what is produced is left out

    @property
    def has_prompt_logprobs(self) -> bool:
        """Return whether the answer has log probabilities of prompts, so that it may be long."""
        return (self.num_prompt_logprobs, self.num_echoed_logprobs) != (None, None)


class AnswerShape(ABC):
    """The JSON of one endpoint's answers."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    stream_format: StreamFormat = OPENAI_STREAM

    def __init__(self, asked: ResponseContext, tokenizer: Tokenizer) -> None:
        self.asked = asked
        self.tokenizer = tokenizer
        self.is_brief = not asked.return_token_ids and not asked.stream_options.has_counts_in_chunks
        self._around_text: dict[int, tuple[bytes, bytes]] = {}  # in events of a choice that tell only text

    def whole(self, deltas: Iterable[Delta]) -> Json:
        """The whole answer, of the deltas of all choices."""
        by_choice = self.by_choice(deltas)
        choices = [self.whole_choice(reported) for reported in by_choice]
        usage = self.usage(sum(map(len, by_choice)))
        return self.envelope(self.whole_object, choices) | {"usage": usage}

    def by_choice(self, deltas: Iterable[Delta]) -> list[list[Delta]]:
        """Return the deltas of each choice."""
        found: list[list[Delta]] = [[] for _ in self.asked.choices]
        for delta in deltas:
            found[delta.choice].append(delta)
        return found

    @abstractmethod
    def whole_choice(self, deltas: Sequence[Delta]) -> Json:
        """One choice, of all its deltas."""

    def opening(self) -> bytes:
        """Return the events of a stream that come before any token."""
        return b""

    def events(self, delta: Delta, num_output_tokens: int) -> bytes:
        """The events of a stream that tell one token, the last of so many of all choices."""
        if (
            self.is_brief
            and delta.index
            and delta.parts is None
            and delta.finish_reason is None
            and delta.logprobs is None
        ):
            around = self._around_text.get(delta.choice) or self._find_around_text(delta.choice)
            return around[0] + msgspec.json.encode(delta.text) + around[1]
        return b"".join(map(event_of, self.chunks(delta, num_output_tokens)))

    @abstractmethod
    def chunks(self, delta: Delta, num_output_tokens: int) -> Iterator[Json]:
        """The same, as JSON."""

    def _find_around_text(self, choice: int) -> tuple[bytes, bytes]:
        """What all events have in common that tell only text: most of them do, and JSON is dear."""
        (chunk,) = self.chunks(Delta(choice, 1, _SOME_TEXT, 0, 0), 0)
        before, after = event_of(chunk).split(msgspec.json.encode(_SOME_TEXT))
        self._around_text[choice] = before, after
        return before, after

    def usage_chunk(self, num_output_tokens: int) -> Json:
        """The event that tells the counts at the end of a stream."""
        return self.envelope(self.chunk_object, []) | {"usage": self.usage(num_output_tokens)}

    def envelope(self, kind: str, choices: Sequence[Json]) -> Json:
        """What stands around the choices."""
        return {
            "id": self.asked.answer_id,
            "object": kind,
            "created": self.asked.created,
            "model": self.asked.model,
            "choices": choices,
        }

    def chunk_envelope(self, choice: Json, num_output_tokens: int) -> Json:
        """What stands around the one choice of a chunk, counts included where they were asked for."""
        chunk = self.envelope(self.chunk_object, [choice])
        options = self.asked.stream_options
        if options.has_counts_in_chunks:
            chunk["usage"] = self.usage(num_output_tokens)
        elif options.include_usage:
            chunk["usage"] = None
        return chunk

    def usage(self, num_output_tokens: int) -> Json:
        """Counts of tokens."""
        num_prompt_tokens = self.asked.num_prompt_tokens
        if self.asked.is_prompt_only:
            num_output_tokens = 0
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
        }

    def token_ids(self, deltas: Sequence[Delta]) -> Json:
        """The ids of the tokens told, if they were asked for."""
        if not self.asked.return_token_ids:
            return {}
        return {"token_ids": [] if self.asked.is_prompt_only else [delta.token_id for delta in deltas]}

    def prompt_token_ids(self, choice: int) -> Json:
        """The ids of a choice's prompt, if ids were asked for."""
        if not self.asked.return_token_ids:
            return {}
        return {"prompt_token_ids": self.asked.choices[choice].request.prompt_token_ids}

    def prompt_logprobs(self, first: Delta) -> Json:
        """Return the log probabilities of a prompt, by token id, if they were asked for.

        `first` is the first delta of a choice.
        """
        if (count := self.asked.num_prompt_logprobs) is None:
            return {}
        entries: list[Json | None] = [None]
        if (found := first.prompt_logprobs) is not None:
            prompt = self.asked.choices[first.choice].request.prompt_token_ids
            for index, token_id in enumerate(prompt[1:]):
                entry = {token_id: self._ranked(token_id, found.chosen[index], found.ranks[index])}
                for rank, (other_id, logprob) in enumerate(found.top_at(index, count), 1):
                    entry[other_id] = self._ranked(other_id, logprob, rank)
                entries.append({str(other_id): ranked for other_id, ranked in entry.items()})
        return {"prompt_logprobs": entries}

    def _ranked(self, token_id: TokenId, logprob: float, rank: int) -> Json:
        text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return {"logprob": logprob, "rank": rank, "decoded_token": text}


class NewShape(Protocol):
    """Makes the shape of an answer: a class of these, or what knows more of the request."""

    @property
    def id_prefix(self) -> str:
        """Return what the ids of answers begin with."""
        ...

    def __call__(self, asked: ResponseContext, tokenizer: Tokenizer) -> AnswerShape:
        """Return the shape of one answer."""
        ...


def finish_fields(delta: Delta) -> Json:
    """Why the answer ends with this token, if it does."""
    reason = delta.finish_reason
    return {"finish_reason": reason.value if reason else None, "stop_reason": delta.stop_reason}


async def send_whole(shape: AnswerShape, deltas: AsyncGenerator[Delta, None]) -> web.Response:
    """Wait for the whole answer, then send it; a long one is put together in a thread."""
    async with aclosing(deltas):
        reported = [delta async for delta in deltas]
    if len(reported) <= _LONG_ANSWER and not shape.asked.has_prompt_logprobs:
        return json_response(shape.whole(reported))
    return await asyncio.to_thread(lambda: json_response(shape.whole(reported)))


async def send_stream(
    http: web.Request, server: Server, shape: AnswerShape, deltas: AsyncGenerator[Delta, None]
) -> web.StreamResponse:
    """Send the answer as it grows; what fails from here on is an event of the stream."""
    stream = EventStream(server.settings, shape.stream_format)
    num_output_tokens = 0
    async with aclosing(deltas), stream.open(http):
        if opening := shape.opening():
            await stream.send(opening)
        async for delta in deltas:
            num_output_tokens += 1
            if delta.prompt_logprobs is None:
                events = shape.events(delta, num_output_tokens)
            else:  # there may be many
                events = await asyncio.to_thread(shape.events, delta, num_output_tokens)
            await stream.send(events)
        if shape.asked.stream_options.include_usage:
            await stream.send(event_of(shape.usage_chunk(num_output_tokens)))
    return stream.response
