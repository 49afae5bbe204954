import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.grammar.pattern import num_repetitions
from loong.grammar.schema import UnsupportedSchemaError, supported

LEAVES = [
    {},
    {"type": "string"},
    {"const": 1},
    {"enum": ["a", None], "title": "A"},
    {"type": "number", "minimum": 2},
]


@pytest.mark.parametrize(
    "schema",
    [
        *LEAVES,
        {"type": ["string", "null"], "minLength": 3},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}], "default": None, "$defs": {"a": {}}},
        {"allOf": [{"$ref": "#"}], "description": "itself"},
        {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
        {"const": "a", "type": "string"},
    ],
)
def test_schemas_that_can_be_kept_to_are_taken_as_they_are(schema: object) -> None:
    assert supported(schema) == schema


def test_an_object_has_no_properties_but_those_it_names() -> None:
    schema = {"type": "array", "items": {"properties": {"a": {"type": "object"}}}}
    closed = {"properties": {"a": {"type": "object"}}, "additionalProperties": False}
    assert supported(schema) == {"type": "array", "items": closed}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {}}, "not"),
        ({"type": "string", "minimum": 3}, "minimum"),
        ({"minLength": 3}, "minLength"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "number", "multipleOf": 0.1}, "multipleOf"),
        ({"type": "object", "properties": {"a": {"if": {}}}}, "#/properties/a"),
        ({"type": "object", "required": ["a"]}, "'a'"),
        ({"$ref": "https://example.com/schema"}, "https://example.com/schema"),
        ({"$ref": "#"}, "refers only to itself"),
        ({"items": {"$ref": "#/$defs/a"}, "type": "array", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "#/items"),
        ({"$ref": "#", "type": "string"}, "type next to \\$ref"),
        ({"anyOf": [{}], "minLength": 1}, "minLength next to anyOf"),
        ({"allOf": [{}, {}]}, "allOf"),
        ({"enum": ["a", 1], "type": "string"}, "enum"),
        ({"type": "string", "format": "color"}, "color"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "pattern, format and lengths"),
        ({"type": "text"}, "'text'"),
        ({"type": "string", "pattern": 3}, "not a string"),
        ({"type": "string", "pattern": "(a{1,99}){1,99}"}, "9801 times"),
        ({"anyOf": [{"type": "string", "pattern": "a*"}] * 2000}, "1001 times"),
        (False, "neither"),
        ({"items": 3, "type": "array"}, "neither"),
    ],
)
def test_what_answers_could_not_be_held_to_is_refused_by_name(schema: object, named: str) -> None:
    with pytest.raises(UnsupportedSchemaError, match=named):
        supported(schema)


def test_schemas_of_any_depth_or_width_end_in_a_refusal() -> None:
    deep: object = {}
    for _ in range(500):
        deep = {"type": "array", "items": deep}
    for schema in (deep, {"anyOf": [{}] * 5000}):
        with pytest.raises(UnsupportedSchemaError, match="too large"):
            supported(schema)


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("", 1),
        ("^a*b+c?$", 1),
        ("a{3}", 3),
        ("a{2,5}b{4,}", 5),
        (r"(\d{1,3}\.){3}\d", 9),
        ("((a|b{2}){3}){4}", 24),
        (r"[{9}\]]{2}\{7}", 2),
        (r"(?:x{5})?y{,4}", 5),
        ("a)b{3}(((", 3),
    ],
)
def test_repetitions_within_repetitions_multiply(pattern: str, count: int) -> None:
    assert num_repetitions(pattern) == count


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["type", "enum", "anyOf", "properties", "required", "$ref", "items", "format"]
                ),
                inner,
                max_size=3,
            )
        ),
        max_leaves=12,
    )
)
def test_whatever_is_sent_is_taken_or_refused(schema: object) -> None:
    with contextlib.suppress(UnsupportedSchemaError):
        supported(schema)
