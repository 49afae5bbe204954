"""The form of a response, whole and as events."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from loong.core.request import FinishReason
from loong.server.api.errors import ApiError
from loong.server.api.sse import StreamFormat
from loong.server.openai.answer import AnswerShape, Json, ResponseContext
from loong.server.openai.output import Delta
from loong.server.responses.events import COMPLETED, IN_PROGRESS, INCOMPLETE, ResponseItems
from loong.server.responses.fields import ResponseFields
from loong.server.text.tokenizer import Tokenizer
from loong.server.tools.parts import Part

_FAILED = "failed"


def typed_event(content: Json) -> bytes:
    """Return one event of a stream, which is named by its type."""
    return b"event: %b\ndata: %b\n\n" % (str(content["type"]).encode(), msgspec.json.encode(content))


class ResponseShape(AnswerShape):
    """A response. It has one choice."""

    id_prefix = "resp"
    whole_object = "response"
    chunk_object = "response"

    def __init__(self, fields: ResponseFields, asked: ResponseContext, tokenizer: Tokenizer) -> None:
        super().__init__(asked, tokenizer)
        self.stream_format = StreamFormat(b"", has_keep_alives=True, error_event=self._failure)
        self.is_brief = False  # each event has its number
        self._fields = fields
        self._items = ResponseItems()
        self._num_events = 0

    def whole(self, deltas: Iterable[Delta]) -> Json:
        """Return the response, as in the last event of a stream."""
        return self.whole_choice(list(deltas))

    def whole_choice(self, deltas: Sequence[Delta]) -> Json:
        """Return the response of its only choice."""
        for delta in deltas:
            for _ in self._items.add(_parts(delta)):
                pass
        for _ in self._items.finish(is_whole=not _is_at_limit(deltas[-1]), is_cut=deltas[-1].is_cut):
            pass
        return self._response(_status(deltas[-1]), len(deltas), deltas[-1])

    def opening(self) -> bytes:
        """Return the events at the beginning of the answer."""
        begun = self._response(IN_PROGRESS, None)
        return self._reported(
            {"type": f"response.{name}", "response": begun} for name in ("created", IN_PROGRESS)
        )

    def events(self, delta: Delta, num_output_tokens: int) -> bytes:
        """Return the events of one token."""
        return self._reported(self.chunks(delta, num_output_tokens))

    def chunks(self, delta: Delta, num_output_tokens: int) -> Iterator[Json]:
        """Yield the events of one token, without sequence numbers."""
        yield from self._items.add(_parts(delta))
        if delta.finish_reason is not None:
            yield from self._items.finish(is_whole=not _is_at_limit(delta), is_cut=delta.is_cut)
            status = _status(delta)
            yield {"type": f"response.{status}", "response": self._response(status, num_output_tokens, delta)}

    def _reported(self, events: Iterable[Json]) -> bytes:
        """Return events with their sequence numbers."""
        reported = []
        for event in events:
            reported.append(typed_event({**event, "sequence_number": self._num_events}))
            self._num_events += 1
        return b"".join(reported)

    def _failure(self, error: ApiError) -> bytes:
        failure = {"code": "server_error", "message": error.message}
        response = self._response(_FAILED, None) | {"error": failure}
        return self._reported([{"type": "response.failed", "response": response}])

    def _response(self, status: str, num_output_tokens: int | None, last: Delta | None = None) -> Json:
        """Return the response so far. Token counts and the `last` delta are known at its end."""
        fields = self._fields
        is_at_limit = last is not None and _is_at_limit(last)
        return {
            "id": self.asked.answer_id,
            "object": self.whole_object,
            "created_at": self.asked.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_at_limit else None,
            "model": self.asked.model,
            "output": list(self._items.items),
            "usage": None if num_output_tokens is None else self._usage(num_output_tokens),
            "instructions": fields.instructions,
            "tools": [tool.as_given() for tool in fields.tools],
            "tool_choice": fields.tool_choice.as_given(),
            "parallel_tool_calls": fields.parallel_tool_calls,
            "text": {"format": fields.text.format.as_given(), "verbosity": fields.text.verbosity},
            "max_output_tokens": fields.max_output_tokens,
            "temperature": fields.temperature,
            "top_p": fields.top_p,
            "metadata": fields.metadata,
            "user": fields.user or None,
            "previous_response_id": None,
            "store": False,
            "background": False,
            "truncation": fields.truncation,
        }

    def _usage(self, num_output_tokens: int) -> Json:
        num_input_tokens = self.asked.num_prompt_tokens
        return {
            "input_tokens": num_input_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input_tokens + num_output_tokens,
        }


def _parts(delta: Delta) -> Sequence[Part]:
    """Return the new parts of an answer, with or without tools."""
    if delta.parts is not None:
        return delta.parts
    return [delta.text] if delta.text else []


def _is_at_limit(last: Delta) -> bool:
    return last.finish_reason is FinishReason.LENGTH


def _status(last: Delta) -> str:
    return INCOMPLETE if _is_at_limit(last) or last.is_cut else COMPLETED


@dataclass(frozen=True, slots=True)
class ResponseShapes:
    """The shapes of answers to one request."""

    id_prefix: ClassVar[str] = ResponseShape.id_prefix
    fields: ResponseFields

    def __call__(self, asked: ResponseContext, tokenizer: Tokenizer) -> ResponseShape:
        """Return the shape of one answer."""
        return ResponseShape(self.fields, asked, tokenizer)
