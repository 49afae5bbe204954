"""Clients' texts inside a prompt of a template: special tokens in them are treated as plain text."""

import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

# Two noncharacters of Unicode, which texts seldom have; in texts they are marked as well.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARK = re.compile(f"{_BEGIN}([0-9]+){_END}")

Value = TypeVar("Value")


class Literals:
    """Replaces special tokens in texts by marks before a template runs, and finds them after it."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        self._special_tokens = tuple(special_tokens)
        longest_first = sorted({*self._special_tokens, _BEGIN, _END}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._taken: list[str] = []

    def mark(self, value: Value) -> Value:
        """Return the value with a mark for each special token in its texts."""
        return self._marked(value)  # type: ignore[return-value]  # a value of the same kind

    def _marked(self, value: object) -> object:
        match value:
            case str():
                return self._pattern.sub(self._take, value)
            case dict():
                return {self._marked(name): self._marked(item) for name, item in value.items()}
            case list():
                return [self._marked(item) for item in value]
            case _:
                return value

    def _take(self, found: re.Match[str]) -> str:
        self._taken.append(found[0])
        return f"{_BEGIN}{len(self._taken) - 1}{_END}"

    def is_part(self, text: str) -> bool:
        """Return whether the text is part of some special token."""
        return any(text in token for token in self._special_tokens)

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield a template's output in pieces, each with whether it was marked."""
        for number, piece in enumerate(_MARK.split(text)):
            if number % 2:
                yield self._taken[int(piece)], True
            elif piece:
                yield piece, False
