"""Patterns in schemas: answers are valid JSON, of strings that match."""

import json
import re

import jsonschema_rs
import pytest
from examples import examples
from grammar_walks import allowed, of_schema, random_output
from hypothesis import given
from hypothesis import strategies as st

from loong.core.grammar import Grammar, GrammarKind
from loong.grammar.json_pattern import PatternError, json_pattern

pytest.importorskip("xgrammar")

NUM_WALKS = 3
PATTERNS = (
    r'^"[a-z]{2}"$',
    r"^C:\\[a-z]{2}$",
    "a\nb",
    r"a\nb",
    "\t|\x01|\x1f",
    r'["\\]{3}',
    r"[\"a]+b",
    r"[\\\]^-]{4}",
    r"[\t\n\r\f\v]{5}",
    r"[\x00-\x1f]{2}",
    r"\x00|\0a",
    r"\u0022\u005c\u0041",
    '(yes|"no")(,(yes|"no")){2}',
    '"?[^"]"?',
    r"[^a]{4}",
    r"[^b-\uffff]",
    r".{3}",
    r"\S\s\W\D\w\d",
    r"[\S][\s][\W][\D][\w\d_-]",
    "é[^é]日.\U0001f600",
    r"[à-ý]{2}\.[😀-😂]",
    r"^(^a|b$)$|^$",
    "a?b*c+?d{2}e{1,}f{0,2}g{0}",
    "x{,3}|y{|z}|]",
    r"(?:a|(b)|(?<name>c))+",
    r"\^\$\.\*\+\?\(\)\[\]\{\}\|\/\-",
    r"[.*+?()[{}|/$]{6}",
    "",
    "()|a||b",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_answer_is_json_of_a_string_that_matches(pattern: str) -> None:
    for seed in range(NUM_WALKS):
        check(pattern, seed)


def check(pattern: str, seed: int) -> None:
    output = random_output(of_schema({"type": "string", "pattern": pattern}), seed, last=b'"')
    found = json.loads(output)
    ours = pattern.replace("(?<name>", "(?P<name>").replace("x{,3}", r"x\{,3\}")
    assert re.fullmatch(ours, found, re.ASCII), (pattern, output)


atoms = st.sampled_from(
    [
        *["a", "é", '"', r"\"", r"\\", "\n", r"\n", r"\x07", r"\u0022", r"\u00e9", ".", r"\.", "/"],
        *[r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "[^a]", '[^"]', r"[^\\]", '["a]', r"[\\x]", "[ -~]"],
        *[r"[\x00-z]", r"[\n-\r]", r"[^\x00-\x1f]", "[à-ý]", r"[\w.-]", r"[\W]", "[^é]", r'["\\\n]'],
    ]
)
patterns = st.recursive(
    atoms,
    lambda inner: (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})")
        | st.tuples(inner, st.sampled_from(["?", "{1,3}", "{2}", "+", "*?"])).map(
            lambda pair: f"({pair[0]}){pair[1]}"
        )
    ),
    max_leaves=7,
)


@examples(30, thorough=600)
@given(patterns, st.integers(0, 2**32))
def test_any_walk_through_any_pattern_ends_in_json_of_a_string_that_matches(pattern: str, seed: int) -> None:
    check(pattern, seed)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r'^"[a-z]{2}"$', '"ab"'),
        (r"^C:\\[a-z]{2}$", r"C:\ab"),
        ("a\nb", "a\nb"),
        (r'[a-z"]{4}', '"a"b'),
        (r'(yes|"no")', '"no"'),
        (r"[\\\n\x05]{3}", "\x05\n\\"),
        (r"[\x00-\x1f]", "\x1f"),
        ("é.", "éa"),
        (r"\u{1F600}\uD83D\uDE00", "\U0001f600\U0001f600"),
        (r"\cA|\/", "\x01"),
        ("a{b,}", "a{b,}"),
    ],
)
def test_strings_that_match_can_be_written(pattern: str, text: str) -> None:
    output = [*json.dumps(text, ensure_ascii=False).encode()]
    grammar = of_schema({"type": "string", "pattern": pattern})
    for length, token_id in enumerate(output):
        assert token_id in allowed(f"{pattern}-{text}", grammar, output[:length])


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("a^b", "^ after its beginning"),
        ("a$b", "$ before its end"),
        ("(a$|b)c", "$ before its end"),
        ("(^a)*", "a repeated ^ or $"),
        ("(a", "an open parenthesis"),
        ("a)", "a closing parenthesis without an opening one"),
        ("[a", "an open bracket"),
        ("[]", "an empty class"),
        (r"[^\s\S]", "a class without characters"),
        ("[z-a]", "a range whose ends are in the wrong order"),
        (r"[a-\d]", "a range that ends with a class"),
        (r"[\d-z]", "a range that begins with a class"),
        ("a**", "two repetitions in a row"),
        ("+a", "nothing before +"),
        ("a{2,1}", "the repetition {2,1}, whose ends are in the wrong order"),
        (r"(a)\1", "a reference"),
        (r"\k<a>", "a reference"),
        ("(?=a)", "a lookahead"),
        ("(?<!a)", "a lookbehind"),
        ("(?i)a", "a group with flags"),
        ("(?<1>a)", "a group with a wrong name"),
        (r"\bword", "a word boundary"),
        (r"\p{L}", "a class of Unicode"),
        (r"\Aa\Z", r"the escape \A"),
        ("a\\", "the escape \\"),
        (r"\uD800", "half of a surrogate pair"),
        (r"\x4", "a wrong escape of a character by its number"),
        (r"\u{110000}", "a wrong escape of a character by its number"),
        ("(" * 65 + ")" * 65, "groups in more than 64 others"),
    ],
)
def test_what_is_not_supported_is_named(pattern: str, what: str) -> None:
    with pytest.raises(PatternError) as refused:
        json_pattern(pattern)
    assert str(refused.value) == what


FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname"),
    *("ipv4", "ipv6", "uuid", "uri", "uri-reference"),
)


@pytest.mark.parametrize("form", FORMATS)
def test_any_answer_of_a_format_is_json_of_such_a_string(form: str) -> None:
    for seed in range(10):
        found = json.loads(random_output(of_schema({"type": "string", "format": form}), seed, last=b'"'))
        assert isinstance(found, str)
        if form not in ("date", "date-time", "time", "email"):  # by pattern: the 30th of February is a date
            jsonschema_rs.validate({"type": "string", "format": form}, found, validate_formats=True)


def test_an_address_has_no_quotes_whose_escapes_json_lacks() -> None:
    grammar = of_schema({"type": "string", "format": "email"})
    assert not {*b'\\"@'} & {*allowed("address", grammar, [*b'"'])}
    assert {*b"@.a"} <= {*allowed("address", grammar, [*b'"a.b'])}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "propertyNames": {"type": "string", "pattern": r'^"\\[a-c]$'}, "minProperties": 1},
        {"type": "array", "items": {"type": "string", "pattern": r'^[a-c"]\n$'}, "minItems": 2},
        {"type": "object", "properties": {'a"\\\n': {"const": 'b"\\\n\x01'}}, "required": ['a"\\\n']},
        {"enum": [{'"': ["\\", "\t"]}, 'é"\u2028']},
        {
            "anyOf": [{"$ref": "#/$defs/q"}, {"type": "null"}],
            "$defs": {"q": {"type": "string", "pattern": '^"+$'}},
        },
    ],
)
def test_whatever_is_to_be_escaped_is_so_wherever_a_schema_has_it(schema: dict[str, object]) -> None:
    for seed in range(NUM_WALKS):
        found = json.loads(random_output(of_schema(schema), seed))
        jsonschema_rs.validate(schema, found)


def test_patterns_within_other_text_are_escaped_too() -> None:
    """As in the arguments of tools."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": r'^"\\$'}},
        "required": ["a"],
    }
    form = {
        "type": "tag",
        "begin": "<",
        "content": {"type": "json_schema", "json_schema": schema},
        "end": ">",
    }
    tag = Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": form}))
    output = random_output(tag, 0, last=b'}">').decode()
    assert json.loads(output.removeprefix("<").removesuffix(">")) == {"a": '"\\'}
