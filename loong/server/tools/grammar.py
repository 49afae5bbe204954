"""Grammars of answers that must call tools, as structural tags."""

from collections.abc import Mapping

import msgspec

from loong.core.grammar import Grammar, GrammarKind
from loong.server.tools.formats import CallFormat

MAX_FORCED_CALLS = 16  # in one answer, because a model may never stop by itself

_Part = dict[str, object]


def calls_grammar(
    form: CallFormat,
    schemas: Mapping[str, Mapping[str, object]],
    *,
    is_parallel: bool,
    or_schema: str | None = None,
) -> Grammar:
    """Return the grammar of an answer that calls tools, given by names and schemas of arguments.

    It has one call, or up to `MAX_FORCED_CALLS` if `is_parallel`. With `or_schema` it may be JSON of that
    schema instead. Without, the prompt already ends with the format's `in_prompt`.
    """
    call: _Part = {"type": "or", "elements": [_call(form, name, schema) for name, schema in schemas.items()]}
    parts = [call]
    if is_parallel:
        between = "\n" if form.separator is None else f"{form.separator} "
        following: _Part = {"type": "sequence", "elements": [_text(between), call]}
        parts.append({"type": "repeat", "min": 0, "max": MAX_FORCED_CALLS - 1, "content": following})
    if form.is_list:
        parts = [_text("["), *parts, _text("]")]
    if or_schema is None:
        return _written({"type": "sequence", "elements": parts})
    if form.in_prompt:
        parts.insert(0, _text(form.in_prompt))
    answers = [_json(msgspec.json.decode(or_schema)), {"type": "sequence", "elements": parts}]
    return _written({"type": "or", "elements": answers})


def _call(form: CallFormat, name: str, schema: object) -> _Part:
    has_tags = bool(form.end)
    begin = f"{form.begin}\n" if has_tags else ""
    key = msgspec.json.encode(name).decode()
    return {
        "type": "tag",
        "begin": f'{begin}{{"name": {key}, "{form.arguments_key}": ',
        "content": _json(schema),
        "end": f"}}\n{form.end}" if has_tags else "}",
    }


def _text(text: str) -> _Part:
    return {"type": "const_string", "value": text}


def _json(schema: object) -> _Part:
    return {"type": "json_schema", "json_schema": schema}


def _written(answer: _Part) -> Grammar:
    text = msgspec.json.encode({"type": "structural_tag", "format": answer}).decode()
    return Grammar(GrammarKind.STRUCTURAL_TAG, text)
