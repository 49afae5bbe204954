"""An answer: sent whole, or as a stream of the same text."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import ClassVar, Protocol

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from loong.core.request import TokenId
from loong.server.answers.base import FINISH_REASONS, Answer, FinishReason
from loong.server.answers.completions import PromptTokensDetails, RankedLogprob, Usage
from loong.server.api.json_bodies import json_response
from loong.server.api.sse import OPENAI_STREAM, EventStream, StreamFormat, event_of
from loong.server.context import Server
from loong.server.openai.choices import Choices
from loong.server.openai.output import Delta
from loong.server.openai.schemas import StreamOptions
from loong.server.text.tokenizer import Tokenizer

_LONG_ANSWER = 512  # tokens, of all choices
_SOME_TEXT = "\0some text\0"  # occurs in no name


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """The request's data that an answer's shape depends on."""

    answer_id: str
    model: str
    created: int  # Unix time, seconds
    choices: tuple[Choices, ...]  # for each choice, the choices of the same prompt
    num_prompt_tokens: int  # of all prompts
    return_token_ids: bool
    stream_options: StreamOptions
    num_prompt_logprobs: int | None = None  # of the likeliest tokens, at each position of the prompt
    num_echoed_logprobs: int | None = None  # the same for an echoed prompt
    is_prompt_only: bool = False  # produced tokens are left out
    are_tokens_named_by_id: bool = False

    @property
    def has_prompt_logprobs(self) -> bool:
        """Return whether the answer has log probabilities of prompts, so that it may be long."""
        return (self.num_prompt_logprobs, self.num_echoed_logprobs) != (None, None)


class AnswerShape(ABC):
    """The form of one endpoint's answers."""

    id_prefix: ClassVar[str]
    stream_format: StreamFormat = OPENAI_STREAM

    def __init__(self, asked: ResponseContext, tokenizer: Tokenizer) -> None:
        self.asked = asked
        self.tokenizer = tokenizer
        self.is_brief = not asked.return_token_ids and not asked.stream_options.has_counts_in_chunks
        self.num_cached_tokens = 0  # of all prompts, as far as they have begun
        self._around_text: dict[int, tuple[bytes, bytes]] = {}  # by choice, in events with only text

    @abstractmethod
    def whole(self, deltas: Sequence[Delta]) -> Answer:
        """Return the whole answer from the deltas of all choices."""

    def by_choice(self, deltas: Iterable[Delta]) -> list[list[Delta]]:
        """Return the deltas of each choice."""
        found: list[list[Delta]] = [[] for _ in self.asked.choices]
        for delta in deltas:
            found[delta.choice].append(delta)
        return found

    def opening(self) -> bytes:
        """Return the events of a stream that come before any token."""
        return b""

    def closing(self, num_output_tokens: int) -> bytes:  # noqa: ARG002 (for endpoints that count tokens there)
        """Return the events of a stream that come after all tokens."""
        return b""

    def events(self, delta: Delta, num_output_tokens: int) -> bytes:
        """Return the stream's events for one token, the last of `num_output_tokens` tokens of all choices."""
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
    def chunks(self, delta: Delta, num_output_tokens: int) -> Iterator[Answer]:
        """Yield the same events as structs."""

    def _find_around_text(self, choice: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text in an event without other news.

        They save JSON encoding.
        """
        (chunk,) = self.chunks(Delta(choice, 1, _SOME_TEXT, 0, 0), 0)
        before, after = event_of(chunk).split(msgspec.json.encode(_SOME_TEXT))
        self._around_text[choice] = before, after
        return before, after

    def usage(self, num_output_tokens: int) -> Usage:
        """Return the token counts."""
        num_prompt_tokens = self.asked.num_prompt_tokens
        if self.asked.is_prompt_only:
            num_output_tokens = 0
        total, details = num_prompt_tokens + num_output_tokens, PromptTokensDetails(self.num_cached_tokens)
        return Usage(num_prompt_tokens, num_output_tokens, total, details)

    def chunk_usage(self, num_output_tokens: int) -> Usage | UnsetType | None:
        """Return the token counts of an event with a choice, if the request wants them there."""
        options = self.asked.stream_options
        if options.has_counts_in_chunks:
            return self.usage(num_output_tokens)
        return None if options.include_usage else UNSET

    def token_name(self, token_id: TokenId) -> str:
        """Return the name of a token in log probabilities."""
        return (
            name_by_id(token_id) if self.asked.are_tokens_named_by_id else self.tokenizer.token_name(token_id)
        )

    def token_ids(self, deltas: Sequence[Delta]) -> list[TokenId] | UnsetType:
        """Return the ids of the tokens of `deltas`, if the request wants ids."""
        if not self.asked.return_token_ids:
            return UNSET
        return [] if self.asked.is_prompt_only else [delta.token_id for delta in deltas]

    def prompt_token_ids(self, choice: int) -> Sequence[TokenId] | UnsetType:
        """Return the ids of a choice's prompt, if the request wants ids."""
        return self.asked.choices[choice].request.prompt_token_ids if self.asked.return_token_ids else UNSET

    def prompt_logprobs(self, first: Delta) -> list[dict[str, RankedLogprob] | None] | UnsetType:
        """Return the log probabilities of a prompt, by token id, if the request wants them.

        `first` is the first delta of a choice.
        """
        if (count := self.asked.num_prompt_logprobs) is None:
            return UNSET
        entries: list[dict[str, RankedLogprob] | None] = [None]
        if (found := first.prompt_logprobs) is not None:
            prompt = self.asked.choices[first.choice].request.prompt_token_ids
            for index, token_id in enumerate(prompt[1:]):
                entry = {token_id: self._ranked(token_id, found.chosen[index], found.ranks[index])}
                for rank, (other_id, logprob) in enumerate(found.top_at(index, count), 1):
                    entry[other_id] = self._ranked(other_id, logprob, rank)
                entries.append({str(other_id): ranked for other_id, ranked in entry.items()})
        return entries

    def _ranked(self, token_id: TokenId, logprob: float, rank: int) -> RankedLogprob:
        return RankedLogprob(logprob, rank, self.tokenizer.token_text(token_id))


class NewShape(Protocol):
    """Makes the shape of an answer: a subclass of AnswerShape, or a callable with more data of the
    request.
    """

    @property
    def id_prefix(self) -> str:
        """The beginning of the ids of answers."""
        ...

    def __call__(self, asked: ResponseContext, tokenizer: Tokenizer) -> AnswerShape:
        """Return the shape of one answer."""
        ...


def name_by_id(token_id: TokenId) -> str:
    """Return the name of a token that does not depend on its text."""
    return f"token_id:{token_id}"


def finish_reason_of(delta: Delta) -> FinishReason | None:
    """Return the reason why the answer ends with this token, if it does."""
    return None if delta.finish_reason is None else FINISH_REASONS[delta.finish_reason]


async def send_whole(shape: AnswerShape, deltas: AsyncGenerator[Delta, None]) -> web.Response:
    """Wait for the whole answer, then return it. A long answer is encoded in a thread."""
    async with aclosing(deltas):
        reported = [delta async for delta in deltas]
    shape.num_cached_tokens = sum(delta.num_cached_tokens for delta in reported)
    if len(reported) <= _LONG_ANSWER and not shape.asked.has_prompt_logprobs:
        return json_response(shape.whole(reported))
    return await asyncio.to_thread(lambda: json_response(shape.whole(reported)))


async def send_stream(
    http: web.Request, server: Server, shape: AnswerShape, deltas: AsyncGenerator[Delta, None]
) -> web.StreamResponse:
    """Stream the answer as it grows. Later errors become events of the stream."""
    stream = EventStream(server.settings, shape.stream_format)
    num_output_tokens = 0
    async with aclosing(deltas), stream.open(http):
        if opening := shape.opening():
            await stream.send(opening)
        async for delta in deltas:
            num_output_tokens += 1
            shape.num_cached_tokens += delta.num_cached_tokens
            if delta.prompt_logprobs is None:
                events = shape.events(delta, num_output_tokens)
            else:  # there may be many log probabilities
                events = await asyncio.to_thread(shape.events, delta, num_output_tokens)
            await stream.send(events)
        if closing := shape.closing(num_output_tokens):
            await stream.send(closing)
    return stream.response
