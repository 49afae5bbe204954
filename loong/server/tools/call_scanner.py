"""One call as JSON, read in pieces: `{"name": "f", "arguments": {"x": 1}}`."""

from collections.abc import Callable, Container, Generator
from typing import Final, TypeAlias

import msgspec

from loong.foreign_json import NOT_JSON

_BLANKS: Final = " \t\r\n"
_NAME_KEY = "name"
_ARGUMENTS_KEYS = frozenset({"arguments", "parameters"})
_IGNORED_KEYS = frozenset({"type", "id", "index"})
_NO_ARGUMENTS = "{}"
_MAX_STRING = 2**16  # characters of a key or a name, at most

_Reading: TypeAlias = Generator[None, str, str]  # takes a character at a time; returns the first one after


class _NoCallError(ValueError):
    """The text is not a call."""


class CallScanner:
    """Reads one JSON object from text in pieces, and reports what is certain of a call.

    A call has the name of a tool and an object of arguments, in any order, and perhaps a type and an id.
    Arguments may also be a string that contains an object, or null. `name` is None until the name and the
    kind of arguments are certain. `raw` is all text taken.
    """

    def __init__(self, names: Container[str], *, needs_arguments: bool) -> None:
        """Read a call of one of `names`. With `needs_arguments`, text without arguments is not a call."""
        self._names, self._needs_arguments = names, needs_arguments
        self.name: str | None = None
        self.raw = ""
        self.is_over = False
        self.is_wrong = False  # `raw` is not a call, and no part of it was reported
        self._found_name: str | None = None
        self._arguments: list[str] | None = None  # not reported yet
        self._reading = self._read()
        next(self._reading)

    def add(self, text: str) -> int:
        """Take text up to the end of the object, and return the number of characters taken."""
        for count, character in enumerate(text, 1):
            try:
                self._reading.send(character)
            except StopIteration:
                self.is_over = True
            except (_NoCallError, *NOT_JSON):
                self.is_over, self.is_wrong = True, self.name is None
            if self.is_over:
                self.raw += text[:count]
                return count
        self.raw += text
        return len(text)

    def take_arguments(self) -> str:
        """Return the new part of the arguments, once the name is certain."""
        if self.name is None or not self._arguments:
            return ""
        new = "".join(self._arguments)
        self._arguments.clear()
        return new

    def _read(self) -> _Reading:
        if (yield from _first()) != "{":
            raise _NoCallError
        character = yield from _first()
        while character != "}":
            key, character = yield from _string(character)
            if character != ":":
                raise _NoCallError
            character = yield from self._value(key, (yield from _first()))
            if character == ",":
                character = yield from _first()
            elif character != "}":
                raise _NoCallError
        if self._arguments is None and not self._needs_arguments:
            self._arguments = [_NO_ARGUMENTS]
        self._settle()
        if self.name is None:
            raise _NoCallError
        return ""

    def _value(self, key: str, character: str) -> _Reading:
        if key == _NAME_KEY and self._found_name is None:
            self._found_name, character = yield from _string(character)
            if self._found_name not in self._names:
                raise _NoCallError
            self._settle()
        elif key in _ARGUMENTS_KEYS and self._arguments is None:
            character = yield from self._read_arguments(character)
        elif key in _IGNORED_KEYS:
            character = yield from _skip(character, lambda _: None)
        else:
            raise _NoCallError
        return character

    def _read_arguments(self, character: str) -> _Reading:
        if character == "{":
            self._arguments = []
            self._settle()
            return (yield from _skip(character, self._arguments.append))
        raw: list[str] = []
        character = yield from _skip(character, raw.append)
        value = msgspec.json.decode("".join(raw))
        if isinstance(value, str):
            held = value if value.strip() else _NO_ARGUMENTS
            value = msgspec.json.decode(held)
        else:
            held = _NO_ARGUMENTS
        if not isinstance(value, dict | None):
            raise _NoCallError
        self._arguments = [held]
        self._settle()
        return character

    def _settle(self) -> None:
        """Make the name certain if the arguments are."""
        if self._arguments is not None:
            self.name = self._found_name


def _first() -> _Reading:
    """Read to the first character that is not a blank."""
    while (character := (yield)) in _BLANKS:
        pass
    return character


def _string(character: str) -> Generator[None, str, tuple[str, str]]:
    """Read the string that starts with `character`, and on to the first non-blank character after it."""
    if character != '"':
        raise _NoCallError
    raw: list[str] = []
    character = yield from _skip(character, raw.append, _MAX_STRING)
    return msgspec.json.decode("".join(raw), type=str), character


def _skip(character: str, put: Callable[[str], None], most: int | None = None) -> _Reading:
    """Read a JSON value and pass its characters to `put`, up to the first non-blank character after it.

    It looks only at brackets and quotes. A value of more than `most` characters is not part of a call.
    """
    if character in ",:}]":
        raise _NoCallError
    is_scalar = character not in '{["'
    depth, is_quoted, is_escaped, count = 0, False, False, 0
    while True:
        count += 1
        if most is not None and count > most:
            raise _NoCallError
        put(character)
        if is_escaped:
            is_escaped = False
        elif is_quoted:
            is_escaped, is_quoted = character == "\\", character != '"'
        elif character == '"':
            is_quoted = True
        elif character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
        if not (is_scalar or depth or is_quoted):
            return (yield from _first())
        character = yield
        if is_scalar and character in ",}] \t\r\n":
            return character if character not in _BLANKS else (yield from _first())
