"""The form of a response, whole and as events."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from loong.core.request import FinishReason
from loong.server.answers.responses import (
    Completed,
    Created,
    Failed,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputDetails,
    OutputDetails,
    Response,
    ResponseEvent,
    ResponseFailure,
    ResponseUsage,
)
from loong.server.api.errors import ApiError
from loong.server.api.sse import StreamFormat
from loong.server.openai.answer import AnswerShape, ResponseContext
from loong.server.openai.output import Delta
from loong.server.responses.events import ResponseItems
from loong.server.responses.fields import ResponseFields
from loong.server.text.tokenizer import Tokenizer
from loong.server.tools.parts import Part


def typed_event(event: ResponseEvent) -> bytes:
    """Return one event of a stream, which is named by its type."""
    tag = str(event.__struct_config__.tag)
    return b"event: %b\ndata: %b\n\n" % (tag.encode(), msgspec.json.encode(event))


class ResponseShape(AnswerShape):
    """A response. It has one choice."""

    id_prefix = "resp"

    def __init__(self, fields: ResponseFields, asked: ResponseContext, tokenizer: Tokenizer) -> None:
        super().__init__(asked, tokenizer)
        self.stream_format = StreamFormat(b"", has_keep_alives=True, error_event=self._failure)
        self.is_brief = False  # each event has its number
        self._fields = fields
        self._items = ResponseItems()
        self._num_events = 0

    def whole(self, deltas: Sequence[Delta]) -> Response:
        """Return the response, as in the last event of a stream."""
        for delta in deltas:
            for _ in self._items.add(_parts(delta)):
                pass
        last = deltas[-1]
        for _ in self._items.finish(is_whole=not _is_at_limit(last), is_cut=last.is_cut):
            pass
        return self._whole(last, len(deltas))

    def opening(self) -> bytes:
        """Return the events at the beginning of the answer."""
        begun = self._response()
        return self._reported((Created(response=begun), InProgress(response=begun)))

    def events(self, delta: Delta, num_output_tokens: int) -> bytes:
        """Return the events of one token."""
        return self._reported(self.chunks(delta, num_output_tokens))

    def chunks(self, delta: Delta, num_output_tokens: int) -> Iterator[ResponseEvent]:
        """Yield the events of one token, without sequence numbers."""
        yield from self._items.add(_parts(delta))
        if delta.finish_reason is not None:
            yield from self._items.finish(is_whole=not _is_at_limit(delta), is_cut=delta.is_cut)
            kind = Incomplete if _is_incomplete(delta) else Completed
            yield kind(response=self._whole(delta, num_output_tokens))

    def _reported(self, events: Iterable[ResponseEvent]) -> bytes:
        """Return events with their sequence numbers."""
        reported = []
        for event in events:
            reported.append(typed_event(msgspec.structs.replace(event, sequence_number=self._num_events)))
            self._num_events += 1
        return b"".join(reported)

    def _failure(self, error: ApiError) -> bytes:
        failed = msgspec.structs.replace(
            self._response(), status="failed", error=ResponseFailure(error.message)
        )
        return self._reported([Failed(response=failed)])

    def _whole(self, last: Delta, num_output_tokens: int) -> Response:
        """Return the response once its `last` delta is known."""
        return msgspec.structs.replace(
            self._response(),
            status="incomplete" if _is_incomplete(last) else "completed",
            incomplete_details=IncompleteDetails() if _is_at_limit(last) else None,
            usage=self._usage(num_output_tokens),
        )

    def _response(self) -> Response:
        """Return the response so far."""
        fields = self._fields
        return Response(
            self.asked.answer_id,
            self.asked.created,
            status="in_progress",
            error=None,
            incomplete_details=None,
            model=self.asked.model,
            output=list(self._items.items),
            usage=None,
            instructions=fields.instructions,
            tools=[tool.as_given() for tool in fields.tools],
            tool_choice=fields.tool_choice.as_given(),
            parallel_tool_calls=fields.parallel_tool_calls,
            text={"format": fields.text.format.as_given(), "verbosity": fields.text.verbosity},
            max_output_tokens=fields.max_output_tokens,
            temperature=fields.temperature,
            top_p=fields.top_p,
            metadata=fields.metadata,
            user=fields.user or None,
        )

    def _usage(self, num_output_tokens: int) -> ResponseUsage:
        num_input_tokens = self.asked.num_prompt_tokens
        return ResponseUsage(
            num_input_tokens,
            InputDetails(self.num_cached_tokens),
            num_output_tokens,
            OutputDetails(),
            num_input_tokens + num_output_tokens,
        )


def _parts(delta: Delta) -> Sequence[Part]:
    """Return the new parts of an answer, with or without tools."""
    if delta.parts is not None:
        return delta.parts
    return [delta.text] if delta.text else []


def _is_at_limit(last: Delta) -> bool:
    return last.finish_reason is FinishReason.LENGTH


def _is_incomplete(last: Delta) -> bool:
    return _is_at_limit(last) or last.is_cut


@dataclass(frozen=True, slots=True)
class ResponseShapes:
    """The shapes of answers to one request."""

    id_prefix: ClassVar[str] = ResponseShape.id_prefix
    fields: ResponseFields

    def __call__(self, asked: ResponseContext, tokenizer: Tokenizer) -> ResponseShape:
        """Return the shape of one answer."""
        return ResponseShape(self.fields, asked, tokenizer)
