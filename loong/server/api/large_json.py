"""Large JSON bodies, read without blocking other requests.

A JSON parser holds the interpreter until it is done: a million token ids would stop all streams for 50 ms or
more. So compiled code that needs no interpreter finds the long parts, lists of integers and strings, and they
are read in pieces. The small remainder goes through the usual parser.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from secrets import token_hex
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from loong.scheduler.common.compiled import compiled
from loong.server.api.errors import bad_request
from loong.server.api.parsing import read_json

LARGE_BODY = 2**18  # bytes; the usual parser reads shorter bodies in one or two milliseconds
MAX_VALUES = 2**17  # of a large body, apart from its long lists of integers
MAX_INTEGERS = 2**23  # in these lists
_MAX_LONG = 2**16  # long parts
_MAX_DIGITS = 18  # of an integer that surely fits 64 bits

_QUOTE, _BACKSLASH, _OPEN, _CLOSE, _COMMA, _MINUS, _ZERO, _NINE = (ord(char) for char in '"\\[],-09')
_U, _BLANKS = ord("u"), (ord(" "), ord("\n"), ord("\t"), ord("\r"))

Body: TypeAlias = NDArray[np.uint8]
Integers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class JsonCut:
    """Bounds of long parts: integers of a list, bytes of a string, and how much is read at once."""

    min_integers: int = 1024
    min_string: int = 4096
    piece: int = 2**16  # holds the interpreter for about a millisecond


def compile_ahead() -> None:
    """Compile the code for large bodies, or load it from the cache. The first time takes a second or two."""
    read_large_json(b'["text", [1, 2]]', JsonCut(min_integers=1, min_string=1, piece=1))


def read_large_json(body: bytes, cut: JsonCut = JsonCut()) -> object:
    """Return the value of a body, equal to that of `read_json`; for a thread.

    Raises a 400 if the body is not JSON, or has too many values.
    """
    found = np.frombuffer(body, np.uint8)
    spans, integers, num_values = _find_long(found, cut.min_integers, cut.min_string)
    if num_values > MAX_VALUES:
        message = f"the body has more than {MAX_VALUES} values, or {MAX_INTEGERS} integers in long lists"
        raise bad_request(message, None, "too_many_values")
    mark = token_hex(16)  # no client can know it, so no body contains it
    parts: list[bytes] = []
    lifted: dict[str, object] = {}
    end = 0
    for begin, after, offset, count in spans.tolist():
        name = f"{mark}{len(lifted)}"
        parts += (body[end:begin], b'"', name.encode(), b'"')
        is_string = count < 0
        lifted[name] = (
            "".join(_pieces(body, range(begin + 1, after - 1), cut.piece))
            if is_string
            else _listed(integers[offset : offset + count], cut.piece)
        )
        end = after
    return _put_back(read_json(b"".join((*parts, body[end:]))), lifted)


def _put_back(content: object, lifted: Mapping[str, object]) -> object:
    match content:
        case str():
            return lifted.get(content, content)
        case list():
            return [_put_back(item, lifted) for item in content]
        case dict():
            return {str(lifted.get(name, name)): _put_back(item, lifted) for name, item in content.items()}
        case _:
            return content


def _listed(integers: Integers, piece: int) -> list[int]:
    found: list[int] = []
    for begin in range(0, len(integers), piece):
        found += integers[begin : begin + piece].tolist()
    return found


def _pieces(body: bytes, span: range, piece: int) -> Iterator[str]:
    """Yield the text between two quotation marks, in pieces."""
    found, begin = np.frombuffer(body, np.uint8), span.start
    while begin < span.stop:
        end = _cut_before(found, begin, min(begin + piece, span.stop), span.stop)
        try:
            yield msgspec.json.decode(b'"%b"' % body[begin:end], type=str)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise bad_request(f"the body is not valid JSON: {error}", None, "invalid_json") from error
        begin = end


@compiled
def _cut_before(body: Body, begin: int, at: int, stop: int) -> int:
    """Return the first place from `at` on where a string can be cut: between characters, outside of
    escapes.
    """
    place = begin
    while place < stop:
        is_escape = body[place] == _BACKSLASH
        is_unicode = is_escape and place + 5 < stop and body[place + 1] == _U
        is_low_half = (  # of a surrogate pair: \\uDC00 to \\uDFFF
            is_unicode and (body[place + 2] | 32) == 100 and (body[place + 3] | 32) in (99, 100, 101, 102)
        )
        is_continued = 128 <= body[place] < 192
        if place >= at and not is_low_half and not is_continued:
            return place
        place += 6 if is_unicode else 2 if is_escape else 1
    return stop


@compiled
def _find_long(body: Body, min_integers: int, min_string: int) -> tuple[NDArray[np.int64], Integers, int]:
    """Return rows of (begin, end, offset in the integers, their number or -1 for a string), and the
    number of values.
    """
    size = len(body)
    spans = np.empty((_MAX_LONG, 4), np.int64)
    integers = np.empty(min(size // 2 + 1, MAX_INTEGERS + 1), np.int64)
    num_spans = num_integers = num_values = place = 0
    while place < size and num_spans < _MAX_LONG and num_values <= MAX_VALUES:
        byte = body[place]
        if byte == _QUOTE:
            end = place + 1
            while end < size and body[end] != _QUOTE:
                end += 2 if body[end] == _BACKSLASH else 1
            if end < size and end - place > min_string:
                spans[num_spans] = (place, end + 1, 0, -1)
                num_spans += 1
            place = end + 1
        elif byte == _OPEN:
            num_values += 1
            end, count = _read_integers(body, place, integers, num_integers)
            if num_integers + count >= len(integers) and len(integers) > MAX_INTEGERS:
                num_values = MAX_VALUES + 1
            if count >= min_integers:
                spans[num_spans] = (place, end, num_integers, count)
                num_spans += 1
                num_integers += count
                place = end
            else:
                place += 1
        else:
            num_values += byte == _COMMA or byte == 123  # what opens an object
            place += 1
    if num_spans == _MAX_LONG:
        num_values = MAX_VALUES + 1
    return spans[:num_spans], integers, num_values


@compiled
def _read_integers(body: Body, place: int, integers: Integers, offset: int) -> tuple[int, int]:
    """Read the list of integers at `place`; return its end and its length, 0 if it is not such a list."""
    size, count = len(body), 0
    place += 1
    while offset + count < len(integers):
        while place < size and body[place] in _BLANKS:
            place += 1
        is_negative = place < size and body[place] == _MINUS
        place += is_negative
        begin, value = place, 0
        while place < size and _ZERO <= body[place] <= _NINE:
            value = 10 * value + (body[place] - _ZERO) if place - begin < _MAX_DIGITS else value
            place += 1
        num_digits = place - begin
        if not 0 < num_digits <= _MAX_DIGITS or (num_digits > 1 and body[begin] == _ZERO):
            return place, 0
        integers[offset + count] = -value if is_negative else value
        count += 1
        while place < size and body[place] in _BLANKS:
            place += 1
        if place < size and body[place] == _CLOSE:
            return place + 1, count
        if place >= size or body[place] != _COMMA:
            return place, 0
        place += 1
    return place, count
