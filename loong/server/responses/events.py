"""The events of a response, and its items."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from loong.server.api.request_ids import new_id
from loong.server.tools.parts import CallArguments, CallStart, Part

Json: TypeAlias = dict[str, object]

COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"


class ResponseItems:
    """The items of one answer, messages and calls, built from its parts in order."""

    def __init__(self) -> None:
        self.items: list[Json] = []  # complete ones
        self._open: _Message | _Call | None = None

    def add(self, parts: Iterable[Part]) -> Iterator[Json]:
        """Yield the events of some parts."""
        for part in parts:
            match part:
                case str():
                    if not isinstance(self._open, _Message):
                        yield from self._begin(_Message(len(self.items) + (self._open is not None)))
                    assert isinstance(self._open, _Message)
                    yield self._open.add(part)
                case CallStart():
                    yield from self._begin(_Call(len(self.items) + (self._open is not None), part))
                case CallArguments():
                    assert isinstance(self._open, _Call)
                    yield self._open.add(part.text)

    def finish(self, *, is_whole: bool, is_cut: bool) -> Iterator[Json]:
        """Yield the events at the end of the answer, which may be inside a call (`is_cut`).

        An answer without items gets an empty message.
        """
        if self._open is None and not self.items:
            yield from self._begin(_Message(0))
        is_complete = not is_cut if isinstance(self._open, _Call) else is_whole
        yield from self._end(COMPLETED if is_complete else INCOMPLETE)

    def _begin(self, item: "_Message | _Call") -> Iterator[Json]:
        yield from self._end(COMPLETED)
        self._open = item
        yield from item.begin()

    def _end(self, status: str) -> Iterator[Json]:
        if (item := self._open) is not None:
            yield from item.end(status)
            self.items.append(item.as_json(status))
            self._open = None


class _Message:
    """A message with one text."""

    def __init__(self, index: int) -> None:
        self._at: Json = {"output_index": index}
        self._id = f"msg_{new_id()}"
        self._text: list[str] = []

    def as_json(self, status: str) -> Json:
        content = [] if status == IN_PROGRESS else [self._part()]
        return {
            "id": self._id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def begin(self) -> Iterator[Json]:
        yield {"type": "response.output_item.added", **self._at, "item": self.as_json(IN_PROGRESS)}
        yield {"type": "response.content_part.added", **self._place(), "part": self._part()}

    def add(self, text: str) -> Json:
        self._text.append(text)
        return {"type": "response.output_text.delta", **self._place(), "delta": text, "logprobs": []}

    def end(self, status: str) -> Iterator[Json]:
        text = "".join(self._text)
        yield {"type": "response.output_text.done", **self._place(), "text": text, "logprobs": []}
        yield {"type": "response.content_part.done", **self._place(), "part": self._part()}
        yield {"type": "response.output_item.done", **self._at, "item": self.as_json(status)}

    def _place(self) -> Json:
        return {"item_id": self._id, **self._at, "content_index": 0}

    def _part(self) -> Json:
        return {"type": "output_text", "text": "".join(self._text), "annotations": [], "logprobs": []}


class _Call:
    """A call of a function."""

    def __init__(self, index: int, start: CallStart) -> None:
        self._at: Json = {"output_index": index}
        self._id = f"fc_{new_id()}"
        self._start = start
        self._arguments: list[str] = []

    def as_json(self, status: str) -> Json:
        return {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": self._start.call_id,
            "name": self._start.name,
            "arguments": "".join(self._arguments),
        }

    def begin(self) -> Iterator[Json]:
        yield {"type": "response.output_item.added", **self._at, "item": self.as_json(IN_PROGRESS)}

    def add(self, text: str) -> Json:
        self._arguments.append(text)
        return {"type": "response.function_call_arguments.delta", **self._place(), "delta": text}

    def end(self, status: str) -> Iterator[Json]:
        arguments = "".join(self._arguments)
        done = {"type": "response.function_call_arguments.done", **self._place()}
        yield {**done, "name": self._start.name, "arguments": arguments}
        yield {"type": "response.output_item.done", **self._at, "item": self.as_json(status)}

    def _place(self) -> Json:
        return {"item_id": self._id, **self._at}
