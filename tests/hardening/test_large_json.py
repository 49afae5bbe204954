import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.server.api import large_json
from loong.server.api.errors import ApiError
from loong.server.api.large_json import JsonCut, read_large_json
from loong.server.api.parsing import read_json

SMALL = JsonCut(min_integers=3, min_string=5, piece=4)

numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(max_size=30)
leaves = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    leaves | st.lists(st.integers(-(10**18), 10**18), max_size=12),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=20,
)


def reported(read: Any, *arguments: Any) -> object:
    """Return the value that is read, or the status that refuses it."""
    try:
        return repr(read(*arguments))
    except ApiError as error:
        return error.status


@given(values, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_a_large_body_says_what_it_says_to_the_usual_parser(
    value: object, ensure_ascii: bool, indent: int | str | None
) -> None:
    body = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent).encode()
    assert reported(read_large_json, body, SMALL) == reported(read_json, body)


@given(st.data())
def test_a_damaged_body_says_what_it_says_to_the_usual_parser(data: st.DataObject) -> None:
    body = bytearray(json.dumps(data.draw(values)).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from(
                [b"", b'"', b"\\", b"[", b"]", b",", b"-", b"0", b"\xff", b"\\ud83d", b"\\udc00", b"\n"]
            )
        )
    assert reported(read_large_json, bytes(body), SMALL) == reported(read_json, bytes(body))


@given(st.binary(max_size=50))
def test_any_bytes_say_what_they_say_to_the_usual_parser(body: bytes) -> None:
    assert reported(read_large_json, body, SMALL) == reported(read_json, body)


def test_too_many_values_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_json, "read_json", pytest.fail)
    for body in (
        b"[%b]" % b"[]," * 300_000,
        b"{%b}" % (b'"a":{},' * 200_000),
        b'["%b"]' % (b'a","' * 200_000),
    ):
        with pytest.raises(ApiError, match="values"):
            read_large_json(body)


def test_a_million_integers_count_as_one_value() -> None:
    body = b'{"prompt": [%b1]}' % (b"77, " * 1_000_000)
    assert read_large_json(body) == {"prompt": [77] * 1_000_000 + [1]}
