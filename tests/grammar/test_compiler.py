import json
import re
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from examples import examples
from grammar_walks import STOPS, allowed, constraints, of_schema, random_output
from hypothesis import given
from hypothesis import strategies as st

from loong.core.grammar import Grammar, GrammarKind

pytest.importorskip("xgrammar")

leaves = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "minLength": 2, "maxLength": 4},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
        {"type": "string", "pattern": "^.{2}[^a]\\d?$"},
        {"type": "string", "format": "date"},
        {"type": "integer", "minimum": 3, "maximum": 40},
        {"type": "integer", "multipleOf": 7},
        {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2},
        {"type": "boolean"},
        {"type": ["null", "integer"]},
        {"enum": ["a", "é\n", 3, None, [1, "x"]]},
        {"const": "k", "type": "string"},
    ]
)


def within(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return schemas of one more level."""
    lists = st.builds(
        lambda items, low: {"type": "array", "items": items, "minItems": low, "maxItems": low + 2},
        inner,
        st.integers(0, 2),
    )
    tuples = st.lists(inner, min_size=1, max_size=2).map(
        lambda items: {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}
    )
    objects = st.builds(
        lambda properties, count: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:count],
        },
        st.dictionaries(st.sampled_from(["a", 'q"', "日"]), inner, min_size=1, max_size=3),
        st.integers(0, 3),
    )
    choices = st.lists(inner, min_size=1, max_size=2).map(lambda schemas: {"anyOf": schemas})
    return lists | tuples | objects | choices


schemas = st.recursive(leaves, within, max_leaves=5)


@examples(12, thorough=240)
@given(schemas, st.integers(0, 2**32))
def test_any_walk_through_the_tokens_allowed_ends_in_json_of_the_schema(schema: Any, seed: int) -> None:
    output = random_output(of_schema(schema), seed)
    value = json.loads(output)
    jsonschema_rs.validate(schema, value)


@pytest.mark.parametrize("seed", range(5))
def test_a_json_object_is_any_object(seed: int) -> None:
    assert isinstance(msgspec.json.decode(random_output(of_schema({"type": "object"}), seed)), dict)


def test_what_is_allowed_depends_on_schema_and_output_alone() -> None:
    grammar = of_schema({"type": "array", "items": {"enum": ["ab", "ba"]}})
    output = [*b'["ab","ba"']
    stepwise = [allowed("one", grammar, output[:n]) for n in range(len(output) + 1)]
    assert [allowed("two", grammar, output)] == stepwise[-1:]
    assert [allowed("one", grammar, output[:n]) for n in (3, 1, 8)] == [stepwise[n] for n in (3, 1, 8)]
    constraints().forget("one")
    assert allowed("one", grammar, output) == stepwise[-1]


def test_only_the_end_may_follow_what_is_whole() -> None:
    assert allowed("whole", of_schema({"const": 1}), [*b"1"]) == [*STOPS]


@pytest.mark.parametrize(
    ("grammar", "output"),
    [
        (of_schema({"not": {}}), b""),
        (Grammar(GrammarKind.JSON_SCHEMA, "["), b""),
        (Grammar(GrammarKind.REGEX, "("), b""),
        (Grammar(GrammarKind.EBNF, "answer ::= 1"), b""),
        (of_schema({"const": 1}), b"2"),
    ],
)
def test_nothing_is_allowed_where_there_is_no_grammar_or_no_way_on(grammar: Grammar, output: bytes) -> None:
    assert allowed("bad", grammar, [*output]) == []


patterns = st.recursive(
    st.sampled_from(["a", "é", "[^a]", r"\d", "[x-z]{2}", ".", r"\.", "\\n"]),
    lambda inner: (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})")
        | st.tuples(inner, st.sampled_from(["?", "{1,3}", "+"])).map(lambda pair: f"({pair[0]}){pair[1]}")
    ),
    max_leaves=6,
)


@examples(12, thorough=240)
@given(patterns, st.integers(0, 2**32))
def test_any_walk_ends_in_a_text_that_the_regular_expression_matches(pattern: str, seed: int) -> None:
    output = random_output(Grammar(GrammarKind.REGEX, pattern), seed, last=pattern.encode())
    assert re.fullmatch(pattern, output.decode(errors="replace"), re.DOTALL)


@examples(8, thorough=160)
@given(st.lists(st.text(max_size=4), min_size=1, max_size=4), st.integers(0, 2**32))
def test_any_walk_ends_in_one_of_the_choices(choices: list[str], seed: int) -> None:
    grammar = Grammar(GrammarKind.CHOICE, msgspec.json.encode(choices).decode())
    assert random_output(grammar, seed).decode() in choices


@pytest.mark.parametrize(
    ("kind", "rules"),
    [
        (GrammarKind.EBNF, 'root ::= number ("+" number)*\nnumber ::= [1-9] [0-9]*'),
        (GrammarKind.LARK, 'start: NUMBER ("+" NUMBER)*\nNUMBER: /[1-9][0-9]*/'),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_any_walk_ends_in_a_text_of_the_rules(kind: GrammarKind, rules: str, seed: int) -> None:
    assert re.fullmatch(rb"[1-9]\d*(\+[1-9]\d*)*", random_output(Grammar(kind, rules), seed))
