"""Answers that a forced call may have."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from loong.core.grammar import Grammar
from loong.grammar.compiler import GrammarCompiler
from loong.model.tiny import CONFIG, tiny_model
from loong.server.tools.formats import FORMATS, HERMES, LLAMA3, MISTRAL, CallFormat
from loong.server.tools.grammar import MAX_FORCED_CALLS, calls_grammar
from loong.server.tools.parser import CallParser
from loong.server.tools.parts import CallStart

pytest.importorskip("xgrammar")

SCHEMAS: Mapping[str, Mapping[str, object]] = {
    "f": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}},
    "g": {"type": "object", "additionalProperties": False},
}
Accepts = Callable[[Grammar, str], bool]
CALLS = {  # of f with 1 and of g
    HERMES: (
        '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    ),
    LLAMA3: ('{"name": "f", "parameters": {"n": 1}}', '{"name": "g", "parameters": {}}'),
    MISTRAL: ('{"name": "f", "arguments": {"n": 1}}', '{"name": "g", "arguments": {}}'),
}


@pytest.fixture(scope="module")
def accepts(tmp_path_factory: pytest.TempPathFactory) -> Accepts:
    """Return whether a text is a whole answer by a grammar."""
    from xgrammar import GrammarMatcher

    folder: Path = tiny_model(tmp_path_factory.mktemp("models"))
    compiler = GrammarCompiler(folder, CONFIG.vocab_size)

    def is_whole(grammar: Grammar, text: str) -> bool:
        matcher = GrammarMatcher(compiler.compile(grammar), override_stop_tokens=[257])
        return all(map(matcher.accept_token, [*text.encode(), 257]))

    return is_whole


def answer(form: CallFormat, calls: list[str]) -> str:
    between = "\n" if form.separator is None else f"{form.separator} "
    return f"[{between.join(calls)}]" if form.is_list else between.join(calls)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_calls_of_the_schemas_are_whole_answers_and_others_are_not(
    form: CallFormat, accepts: Accepts
) -> None:
    f, g = CALLS[form]
    many = calls_grammar(form, SCHEMAS, is_parallel=True)
    for calls in ([f], [g], [f, g, f], [g] * MAX_FORCED_CALLS):
        assert accepts(many, answer(form, calls))
    wrong = [f.replace("1", '"1"'), f.replace('"f"', '"h"'), g.replace("{}", '{"n": 1}')]
    for calls in ([], [g] * (MAX_FORCED_CALLS + 1), *([call] for call in wrong)):
        assert not accepts(many, answer(form, calls))
    assert not accepts(many, "No.")


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_one_call_is_all_that_there_may_be_where_calls_are_not_parallel(
    form: CallFormat, accepts: Accepts
) -> None:
    f, g = CALLS[form]
    one = calls_grammar(form, {"g": SCHEMAS["g"]}, is_parallel=False)
    assert accepts(one, answer(form, [g]))
    assert not accepts(one, answer(form, [g, g]))
    assert not accepts(one, answer(form, [f]))


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_an_answer_may_be_json_of_a_schema_instead(form: CallFormat, accepts: Accepts) -> None:
    either = calls_grammar(form, SCHEMAS, is_parallel=True, or_schema='{"enum": ["yes", "no"]}')
    calls = form.in_prompt + answer(form, [*CALLS[form]])
    assert accepts(either, calls)
    assert accepts(either, '"no"')
    assert not accepts(either, '"maybe"')


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_what_the_grammar_allows_is_read_as_calls(form: CallFormat) -> None:
    parser = CallParser(form, SCHEMAS, is_forced=True)
    parts = parser.add(answer(form, [*CALLS[form]])) + parser.finish()
    assert [part.name for part in parts if isinstance(part, CallStart)] == ["f", "g"]
    assert not [part for part in parts if isinstance(part, str)]
