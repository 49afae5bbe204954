"""The events of a response, and its items."""

from collections.abc import Iterable, Iterator

from loong.server.answers.responses import (
    ArgumentsDelta,
    ArgumentsDone,
    ItemAdded,
    ItemDone,
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    PartAdded,
    PartDone,
    ResponseEvent,
    TextDelta,
    TextDone,
)
from loong.server.api.request_ids import new_id
from loong.server.tools.parts import CallArguments, CallStart, Part


class ResponseItems:
    """The items of one answer, messages and calls, built from its parts in order."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []  # complete ones
        self._open: _Message | _Call | None = None

    def add(self, parts: Iterable[Part]) -> Iterator[ResponseEvent]:
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

    def finish(self, *, is_whole: bool, is_cut: bool) -> Iterator[ResponseEvent]:
        """Yield the events at the end of the answer, which may be inside a call (`is_cut`).

        An answer without items gets an empty message.
        """
        if self._open is None and not self.items:
            yield from self._begin(_Message(0))
        is_complete = not is_cut if isinstance(self._open, _Call) else is_whole
        yield from self._end("completed" if is_complete else "incomplete")

    def _begin(self, item: "_Message | _Call") -> Iterator[ResponseEvent]:
        yield from self._end("completed")
        self._open = item
        yield from item.begin()

    def _end(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        if (item := self._open) is not None:
            yield from item.end(status)
            self.items.append(item.as_item(status))
            self._open = None


class _Message:
    """A message with one text."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._id = f"msg_{new_id()}"
        self._text: list[str] = []

    def as_item(self, status: ItemStatus) -> OutputMessage:
        content = [] if status == "in_progress" else [self._part()]
        return OutputMessage(id=self._id, status=status, content=content)

    def begin(self) -> Iterator[ResponseEvent]:
        yield ItemAdded(output_index=self._index, item=self.as_item("in_progress"))
        yield PartAdded(item_id=self._id, output_index=self._index, part=self._part())

    def add(self, text: str) -> TextDelta:
        self._text.append(text)
        return TextDelta(item_id=self._id, output_index=self._index, delta=text)

    def end(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        part = self._part()
        yield TextDone(item_id=self._id, output_index=self._index, text=part.text)
        yield PartDone(item_id=self._id, output_index=self._index, part=part)
        yield ItemDone(output_index=self._index, item=self.as_item(status))

    def _part(self) -> OutputText:
        return OutputText("".join(self._text))


class _Call:
    """A call of a function."""

    def __init__(self, index: int, start: CallStart) -> None:
        self._index = index
        self._id = f"fc_{new_id()}"
        self._start = start
        self._arguments: list[str] = []

    def as_item(self, status: ItemStatus) -> OutputCall:
        return OutputCall(self._id, status, self._start.call_id, self._start.name, "".join(self._arguments))

    def begin(self) -> Iterator[ResponseEvent]:
        yield ItemAdded(output_index=self._index, item=self.as_item("in_progress"))

    def add(self, text: str) -> ArgumentsDelta:
        self._arguments.append(text)
        return ArgumentsDelta(item_id=self._id, output_index=self._index, delta=text)

    def end(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        item = self.as_item(status)
        yield ArgumentsDone(
            item_id=self._id, output_index=self._index, name=item.name, arguments=item.arguments
        )
        yield ItemDone(output_index=self._index, item=item)
