"""Tool calls in the text of an answer, parsed as the text arrives."""

from collections.abc import Callable, Container

from loong.server.text.stop_strings import overlap
from loong.server.tools.call_scanner import CallScanner
from loong.server.tools.formats import CallFormat
from loong.server.tools.parts import CallArguments, CallStart, Part

_BLANKS = " \t\r\n"


class CallParser:
    """Splits an answer into content and calls, whatever the pieces of its text are.

    Text that looks like a call but has another form, or calls an unknown tool, is content. Blanks next to
    calls are dropped, but content on both sides of calls stays on separate lines.
    """

    def __init__(
        self, form: CallFormat, names: Container[str], *, is_forced: bool = False, is_parallel: bool = True
    ) -> None:
        """Parse calls of the tools `names`. Without `is_parallel` the first call ends the answer."""
        self._form, self._names, self._is_parallel = form, names, is_parallel
        self._pending = ""  # undecided text
        self._blanks = ""  # at the end of the content so far, dropped if a call follows
        self._has_content_before = False  # in the whole answer
        self._has_content = False  # since the last call
        self._parts: list[Part] = []
        self.num_calls = 0
        self.is_done = False  # the rest of the text is ignored
        self.is_cut = False  # the text ended inside a call of which a part was reported
        self._state: Callable[[], bool] = self._in_text  # returns whether to continue with the pending text
        if is_forced and form.in_prompt:
            self._open("")
        elif form.begins_bare:
            self._state = self._at_start

    def add(self, text: str) -> list[Part]:
        """Take more text, and return the parts that are certain."""
        self._pending += text
        while not self.is_done and self._state():
            pass
        return self._take()

    def finish(self) -> list[Part]:
        """Return the parts held back, after the end of the text."""
        if self.is_done:
            return []
        if self._state == self._in_call:
            self.is_cut = self._has_begun
            if not self._has_begun:
                self._say(self._opening + self._scanner.raw)
        elif self._state == self._before_list:
            self._say(self._opening + self._pending)
        elif self._state != self._after_call:
            self._say(self._pending)
        self.is_done = True
        if self._blanks:
            self._parts.append(self._blanks)
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _at_start(self) -> bool:
        text = self._pending.lstrip(_BLANKS)
        if not text:
            return False
        if text[0] == "{":
            self._begin_call(self._pending[: len(self._pending) - len(text)])
            self._pending = text
        else:
            self._state = self._in_text
        return True

    def _in_text(self) -> bool:
        begin = self._form.begin
        text, found, rest = self._pending.partition(begin)
        if found:
            self._say(text)
            self._pending = rest
            self._open(begin)
            return True
        num_held = overlap(text, begin)
        self._pending = text[len(text) - num_held :]
        self._say(text[: len(text) - num_held])
        return False

    def _say(self, text: str) -> None:
        """Add content, without the blanks at its end."""
        text = self._blanks + text
        if self.num_calls and not self._has_content:
            text = text.lstrip(_BLANKS)
        content = text.rstrip(_BLANKS)
        self._blanks = text[len(content) :]
        if content:
            is_apart = self._has_content_before and not self._has_content
            self._has_content = self._has_content_before = True
            self._parts.append(f"\n{content}" if is_apart else content)

    def _open(self, opening: str) -> None:
        """Continue where a call, or a list of calls, begins after `opening`."""
        if self._form.is_list:
            self._opening = opening
            self._state = self._before_list
        else:
            self._begin_call(opening)

    def _before_list(self) -> bool:
        text = self._pending.lstrip(_BLANKS)
        if not text:
            return False
        if text[0] == "[":
            num_blanks = len(self._pending) - len(text)
            self._begin_call(self._opening + self._pending[: num_blanks + 1])
            self._pending = text[1:]
        else:
            self._state = self._in_text
            self._say(self._opening)
        return True

    def _begin_call(self, opening: str) -> None:
        self._opening = opening
        self._scanner = CallScanner(self._names, needs_arguments=self._form.begins_bare)
        self._has_begun = False
        self._state = self._in_call

    def _in_call(self) -> bool:
        scanner = self._scanner
        self._pending = self._pending[scanner.add(self._pending) :]
        if scanner.name is not None and not self._has_begun:
            self._has_begun, self._has_content, self._blanks = True, False, ""
            self._parts.append(CallStart(self.num_calls, self._form.make_id(), scanner.name))
            self.num_calls += 1
        if arguments := scanner.take_arguments():
            self._parts.append(CallArguments(self.num_calls - 1, arguments))
        if scanner.is_wrong:
            self._say(self._opening + scanner.raw[:-1])
            self._pending = scanner.raw[-1] + self._pending
            self._state = self._in_text
        elif scanner.is_over:
            self.is_done = not self._is_parallel
            self._state = self._after_call
        return scanner.is_over

    def _after_call(self) -> bool:
        text = self._pending.lstrip(_BLANKS)
        closing = self._form.end or ("]" if self._form.is_list else "")
        separator = self._form.separator
        if not text or (closing != text and closing.startswith(text)):
            return False
        if closing and text.startswith(closing):
            self._pending = text[len(closing) :]
            self._state = self._in_text
        elif separator is not None and text.startswith(separator):
            self._pending = text[len(separator) :]
            self._begin_call(separator)
        elif text[0] == "{":
            self._pending = text
            self._begin_call("")
        else:
            self._state = self._in_text
        return True
