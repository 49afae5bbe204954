"""Patterns of strings, as patterns of their JSON, which escapes quotes, backslashes and control characters.

They are regular expressions as in JavaScript (ECMA 262), without assertions inside and without references.
"""

from typing import NamedTuple

from loong.grammar.json_characters import (
    ALL,
    ESCAPE,
    SURROGATES,
    Ranges,
    character,
    character_of,
    joined,
    without,
)

_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_BLANK: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D))
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _BLANK}
_CONTROL = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_REFUSED = {
    **dict.fromkeys("bB", "a word boundary"),
    **dict.fromkeys("pP", "a class of Unicode"),
    **dict.fromkeys("k123456789", "a reference"),
}
_MAX_DEPTH = 64  # of groups
_GROUPS = {"=": "a lookahead", "!": "a lookahead", "<=": "a lookbehind", "<!": "a lookbehind"}
# xgrammar keeps to escapes only in patterns with characters beyond ASCII.
_KEEPS_ESCAPES = "(?:é){0}"


class PatternError(ValueError):
    """A pattern has a part that is not supported, which completes the sentence "it has ..."."""


def json_pattern(pattern: str) -> str:
    """Return the pattern of what stands between the quotes in the JSON of strings that match a pattern.

    A string matches as a whole. The result may match fewer: a dot, a range and a negated class leave out what
    would have to be escaped. Raises `PatternError` for a pattern that is not supported.
    """
    parser = _Parser(pattern)
    text, _ = parser.alternatives(is_first=True)
    if parser.position < len(pattern):
        raise PatternError("a closing parenthesis without an opening one")
    return f"(?:{text}){_KEEPS_ESCAPES}" if ESCAPE in text else text


class _Part(NamedTuple):
    """A part of the result, and whether it asserts where the string begins or ends."""

    text: str
    asserts: bool = False
    is_end: bool = False


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.position = 0
        self._depth = 0

    def alternatives(self, *, is_first: bool) -> tuple[str, _Part]:
        """Return the alternatives up to the end of the group, and a part without text for all of them."""
        found = [self._sequence(is_first=is_first)]
        while self._skip("|"):
            found.append(self._sequence(is_first=is_first))
        whole = _Part("", any(part.asserts for part in found), any(part.is_end for part in found))
        return "|".join(part.text for part in found), whole

    def _sequence(self, *, is_first: bool) -> _Part:
        parts: list[_Part] = []
        while self._next() not in ("", "|", ")"):
            if parts and parts[-1].is_end and self._next() != "$":
                raise PatternError("$ before its end")
            parts.append(self._quantified(is_first=is_first and all(part.asserts for part in parts)))
        return _Part(
            "".join(part.text for part in parts),
            any(part.asserts for part in parts),
            any(part.is_end for part in parts),
        )

    def _quantified(self, *, is_first: bool) -> _Part:
        part = self._atom(is_first=is_first)
        if quantifier := self._quantifier():
            if part.asserts:
                raise PatternError("a repeated ^ or $")
            if self._quantifier():
                raise PatternError("two repetitions in a row")
            return _Part(f"{part.text}{quantifier}")
        return part

    def _atom(self, *, is_first: bool) -> _Part:
        match found := self._take():
            case "^":
                if not is_first:
                    raise PatternError("^ after its beginning")
                return _Part("", asserts=True)
            case "$":
                return _Part("", asserts=True, is_end=True)
            case "(":
                self._begin_group()
                text, whole = self.alternatives(is_first=is_first)
                self._end_group()
                return whole._replace(text=f"(?:{text})")
            case "[":
                return _Part(self._class())
            case ".":
                return _Part(character_of(without(ALL, _LINE_ENDS)))
            case "*" | "+" | "?":
                raise PatternError(f"nothing before {found}")
            case "\\":
                return _Part(self._escape())
            case _:
                return _Part(self._literal(ord(found)))

    def _quantifier(self) -> str:
        """Return the next quantifier, or nothing. A lazy one allows the same."""
        found = ""
        if self._next() in ("*", "+", "?"):
            found = self._take()
        elif self._next() == "{":
            numbers, closing, _ = self._pattern[self.position + 1 :].partition("}")
            least, comma, most = numbers.partition(",")
            if closing and numbers.isascii() and least.isdigit() and (not most or most.isdigit()):
                if comma and most and int(most) < int(least):
                    raise PatternError(f"the repetition {{{numbers}}}, whose ends are in the wrong order")
                self.position += len(numbers) + 2
                found = f"{{{numbers}}}"
        if found:
            self._skip("?")
        return found

    def _begin_group(self) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError(f"groups in more than {_MAX_DEPTH} others")
        if not self._skip("?"):
            return
        for opening, what in _GROUPS.items():
            if self._pattern.startswith(opening, self.position):
                raise PatternError(what)
        if self._skip("<"):
            name, closing, _ = self._pattern[self.position :].partition(">")
            if not closing or not name.isidentifier():
                raise PatternError("a group with a wrong name")
            self.position += len(name) + 1
        elif not self._skip(":"):
            raise PatternError("a group with flags")

    def _end_group(self) -> None:
        self._depth -= 1
        if not self._skip(")"):
            raise PatternError("an open parenthesis")

    def _escape(self) -> str:
        """Return what follows a backslash outside of classes."""
        name = self._next()
        if name.lower() in _CLASSES:
            return character_of(self._named_class())
        if name in _REFUSED:
            raise PatternError(_REFUSED[name])
        return self._literal(self._escaped())

    def _literal(self, point: int) -> str:
        self._check_pair(point)
        return character(point)

    def _check_pair(self, point: int) -> None:
        if 0xD800 <= point <= 0xDFFF:
            raise PatternError("half of a surrogate pair")

    def _escaped(self) -> int:
        """Return the code point of an escape, after its backslash."""
        name = self._take()
        if name in _CONTROL:
            return _CONTROL[name]
        if name == "0" and self._next() not in tuple("0123456789"):
            return 0
        if name == "c" and self._next().isascii() and self._next().isalpha():
            return ord(self._take()) % 32
        if name == "x":
            return self._hexadecimal(2)
        if name == "u":
            return self._unicode()
        if not name or not name.isascii() or name.isalnum():
            raise PatternError(f"the escape \\{name}")
        return ord(name)

    def _unicode(self) -> int:
        if self._skip("{"):
            digits, closing, _ = self._pattern[self.position :].partition("}")
            self._check(bool(closing) and 0 < len(digits) <= 6)
            point = self._hexadecimal(len(digits))
            self._skip("}")
        else:
            point = self._hexadecimal(4)
            if 0xD800 <= point < 0xDC00 and self._pattern.startswith("\\u", self.position):
                self.position += 2
                point = 0x10000 + ((point - 0xD800) << 10) + (self._hexadecimal(4) - 0xDC00)
        self._check(point <= 0x10FFFF)
        return point

    def _hexadecimal(self, num_digits: int) -> int:
        digits = self._pattern[self.position : self.position + num_digits]
        self._check(len(digits) == num_digits and all(digit in "0123456789abcdefABCDEF" for digit in digits))
        self.position += num_digits
        return int(digits, 16)

    def _check(self, is_right: bool) -> None:
        if not is_right:
            raise PatternError("a wrong escape of a character by its number")

    def _named_class(self) -> Ranges:
        name = self._take()
        ranges = _CLASSES[name.lower()]
        return ranges if name.islower() else without(ALL, ranges)

    def _class(self) -> str:
        is_negated = self._skip("^")
        ranges: list[tuple[int, int]] = []
        written: list[int] = []  # characters that stand there by themselves
        while (found := self._take()) != "]":
            if not found:
                raise PatternError("an open bracket")
            if found == "\\" and self._next().lower() in _CLASSES:
                ranges += self._named_class()
                if self._next() == "-" and self._after(1) != "]":
                    raise PatternError("a range that begins with a class")
                continue
            first = last = self._class_member(found)
            if self._next() == "-" and self._after(1) not in ("", "]"):
                self._take()
                last = self._range_end()
            if last < first:
                raise PatternError("a range whose ends are in the wrong order")
            ranges.append((first, last))
            written += [first] if first == last else []
        if not ranges:
            raise PatternError("an empty class")
        members = without(joined(ranges), SURROGATES)
        chosen = without(ALL, members) if is_negated else members
        if not chosen:
            raise PatternError("a class without characters")
        return character_of(chosen, () if is_negated else written)

    def _class_member(self, found: str) -> int:
        if found != "\\":
            return ord(found)
        if self._skip("b"):
            return 0x08
        return self._escaped()

    def _range_end(self) -> int:
        found = self._take()
        if found == "\\" and self._next().lower() in _CLASSES:
            raise PatternError("a range that ends with a class")
        return self._class_member(found)

    def _next(self) -> str:
        return self._after(0)

    def _after(self, count: int) -> str:
        return self._pattern[self.position + count : self.position + count + 1]

    def _take(self) -> str:
        found = self._next()
        self.position += 1
        return found

    def _skip(self, text: str) -> bool:
        is_there = self._pattern.startswith(text, self.position)
        self.position += len(text) * is_there
        return is_there
