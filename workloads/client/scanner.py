"""Reads a short text from left to right, and names the place of an error."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from loong.core.errors import ConfigError

NUMBER = re.compile(r"-?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|inf\b")


class Scanner:
    """The unread part of `text`. Errors call the text a `what`, and count characters from 1."""

    def __init__(self, what: str, text: str) -> None:
        self._what = what
        self._text = text
        self.position = 0

    @property
    def is_at_end(self) -> bool:
        """Return whether nothing is left."""
        return self.position == len(self._text)

    def take(self, pattern: "str | re.Pattern[str]") -> str | None:
        """Take the next characters if they match; a `str` is matched literally."""
        expression = re.compile(re.escape(pattern)) if isinstance(pattern, str) else pattern
        match = expression.match(self._text, self.position)
        if match is None:
            return None
        self.position = match.end()
        return match.group()

    def numbers(self) -> list[float] | None:
        """Take numbers in parentheses, divided by commas; None if there are no parentheses.

        Raises:
            ConfigError: something else in them, or no closing one.
        """
        if self.take("(") is None:
            return None
        numbers: list[float] = []
        while True:
            number = self.take(NUMBER)
            if number is None:
                self.fail("a number is expected")
            numbers.append(float(number))
            if self.take(")"):
                return numbers
            if not self.take(","):
                self.fail("a comma or a closing parenthesis is expected")

    @contextmanager
    def blaming(self, position: int) -> Iterator[None]:
        """Attribute errors inside the context to the text at `position`."""
        try:
            yield
        except ConfigError as error:
            self.fail(str(error), position)

    def fail(self, problem: str, position: int | None = None) -> NoReturn:
        """Raise a `ConfigError` that names the place: `position`, or where the scanner is."""
        place = self.position if position is None else position
        found = repr(self._text[place]) if place < len(self._text) else "the end"
        raise ConfigError(f"{self._what} {self._text!r}, character {place + 1} ({found}): {problem}")
