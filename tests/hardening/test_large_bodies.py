import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.server.api import json_bodies
from loong.server.api.errors import ApiError
from loong.server.api.json_bodies import MAX_PARTS, MAX_VALUES, read_large_json
from loong.server.api.parsing import read_json

numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(max_size=30) | st.text('\\"[{,', max_size=30)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=20,
)


@given(values, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_a_large_body_has_the_value_that_it_has_as_a_small_one(
    value: object, ensure_ascii: bool, indent: int | str | None
) -> None:
    body = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent).encode()
    assert repr(read_large_json(body)) == repr(read_json(body)) == repr(json.loads(body))


@pytest.mark.parametrize(
    "body",
    [
        b"[%b]" % b"[]," * 300_000,
        b"{%b}" % (b'"a":{},' * 200_000),
        b'["%b"]' % (b'a","' * 300_000),
        b'["%b"]' % (b'\\"","\\\\","' * 200_000),
        b"[%b1]" % (b"1," * (MAX_VALUES + 1)),
    ],
    ids=["lists", "objects", "texts", "escapes", "numbers"],
)
def test_too_many_values_are_refused_before_they_are_made(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_bodies, "read_json", pytest.fail)
    with pytest.raises(ApiError, match="values") as refused:
        read_large_json(body)
    assert refused.value.code == "too_many_values"


def test_a_million_integers_are_not_too_many() -> None:
    body = b'{"prompt": [%b1]}' % (b"77, " * 1_000_000)
    assert read_large_json(body) == {"prompt": [77] * 1_000_000 + [1]}


def test_signs_in_a_text_do_not_count() -> None:
    text = '[{,"\\' * (2 * MAX_PARTS)
    assert read_large_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}


@pytest.mark.parametrize("body", [b"[" * 10_000, b'"\xff"', b'"\\ud83d"', b"NaN", b"[1,]", b"", b"1e400"])
def test_what_is_no_json_is_refused(body: bytes) -> None:
    for read in (read_json, read_large_json):
        with pytest.raises(ApiError, match="the body is not valid JSON") as refused:
            read(body)
        assert refused.value.code == "invalid_json"
