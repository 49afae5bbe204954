"""Texts with calls, in any pieces."""

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.server.tools.formats import HERMES, LLAMA3, MISTRAL, CallFormat
from loong.server.tools.parser import CallParser
from loong.server.tools.parts import CallArguments, CallStart

NAMES = frozenset({"f", "g"})
Read = tuple[str, list[tuple[str, str]]]

CASES: list[tuple[CallFormat, str, Read]] = [
    (HERMES, "hi  \n", ("hi  \n", [])),
    (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {"a": "}<tool_call>\\"{"}}\n</tool_call>',
        ("", [("f", '{"a": "}<tool_call>\\"{"}')]),
    ),
    (
        HERMES,
        'A \n<tool_call>{"arguments": {"x":1}, "name":"g"}</tool_call> <tool_call>{"name":"f"}</tool_call>b',
        ("A\nb", [("g", '{"x":1}'), ("f", "{}")]),
    ),
    (
        HERMES,
        '<tool_call>{"name":"h","arguments":{}}</tool_call> x',
        ('<tool_call>{"name":"h","arguments":{}}</tool_call> x', []),
    ),
    (HERMES, '<tool_call> <tool_call>{"name":"f","arguments":null}', ("<tool_call>", [("f", "{}")])),
    (HERMES, '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool', ("", [("f", '{"a":1}')])),
    (HERMES, '<tool_call>{"name":"f","arguments":[1]}', ('<tool_call>{"name":"f","arguments":[1]}', [])),
    (HERMES, '<tool_call>{"name":"f","arguments":{"a":1', ("", [("f", '{"a":1')])),
    (HERMES, '<tool_call>{"na', ('<tool_call>{"na', [])),
    (HERMES, "a <tool", ("a <tool", [])),
    (
        LLAMA3,
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        ("", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', ("", [("f", '{"a": 1}')])),
    (LLAMA3, 'ok<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', ("ok", [("f", "{}")])),
    (LLAMA3, '{"name": "f"}', ('{"name": "f"}', [])),
    (LLAMA3, ' {"answer": 42}', (' {"answer": 42}', [])),
    (
        LLAMA3,
        'say {"name": "f", "parameters": {}}',
        ('say {"name": "f", "parameters": {}}', []),
    ),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}, "id": "x"}]',
        ("", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    (MISTRAL, 'ok [TOOL_CALLS] [{"name": "f", "arguments": {}}] then', ("ok\nthen", [("f", "{}")])),
    (MISTRAL, '[{"name": "f", "arguments": {}}]', ('[{"name": "f", "arguments": {}}]', [])),
    (MISTRAL, '[TOOL_CALLS] [ {"name":"z"}]', ('[TOOL_CALLS] [ {"name":"z"}]', [])),
    (MISTRAL, "[TOOL_CALLS]{", ("[TOOL_CALLS]{", [])),
]


def read(parser: CallParser, pieces: Sequence[str]) -> Read:
    """Return the content, and name and arguments of each call; fails unless the parts come in order."""
    parts = [part for piece in pieces for part in parser.add(piece)] + parser.finish()
    content, calls = "", list[tuple[str, str]]()
    for part in parts:
        match part:
            case str():
                content += part
            case CallStart():
                assert part.index == len(calls)
                calls.append((part.name, ""))
            case CallArguments():
                name, arguments = calls[part.index]
                assert part.index == len(calls) - 1
                calls[part.index] = (name, arguments + part.text)
    return content, calls


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
@given(cuts=st.sets(st.integers(1, 120)))
def test_a_text_is_read_the_same_in_any_pieces(
    form: CallFormat, text: str, expected: Read, cuts: set[int]
) -> None:
    ends = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(ends)]
    assert read(CallParser(form, NAMES), pieces) == expected


@given(text=st.text(alphabet='<tool_call>/{}[]",:;fnameargumts \\\n', max_size=80))
def test_a_text_without_a_call_is_content_to_the_letter(text: str) -> None:
    for form in (HERMES, LLAMA3, MISTRAL):
        content, calls = read(CallParser(form, frozenset()), [*text])
        assert (content, calls) == (text, [])


@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(sorted(NAMES)),
            st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_calls_of_any_arguments_are_found(calls: list[tuple[str, dict[str, str]]]) -> None:
    def written(key: str) -> list[str]:
        return [json.dumps({"name": name, key: arguments}, ensure_ascii=False) for name, arguments in calls]

    texts = {
        HERMES: "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written("arguments")),
        LLAMA3: "; ".join(written("parameters")),
        MISTRAL: f"[TOOL_CALLS][{', '.join(written('arguments'))}]",
    }
    for form, text in texts.items():
        content, found = read(CallParser(form, NAMES), [*text])
        assert (content, [(name, json.loads(arguments)) for name, arguments in found]) == ("", calls)


def test_an_only_call_is_the_end() -> None:
    parser = CallParser(HERMES, NAMES, is_parallel=False)
    call = '<tool_call>{"name": "f", "arguments": {}}'
    assert read(parser, [f"a {call}", f"</tool_call>{call}"]) == ("a", [("f", "{}")])
    assert parser.is_done


def test_a_forced_call_of_mistral_goes_on_after_its_marker() -> None:
    parser = CallParser(MISTRAL, NAMES, is_forced=True)
    assert read(parser, ['[{"name": "f", "arguments": {}}]']) == ("", [("f", "{}")])


def test_ids_are_what_templates_take() -> None:
    for form, length in ((HERMES, 29), (MISTRAL, 9)):
        ids = {form.make_id() for _ in range(100)}
        assert len(ids) == 100
        assert {len(call_id) for call_id in ids} == {length}
    assert MISTRAL.make_id().isalnum()
