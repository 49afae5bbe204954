"""The one grammar of a request, from any of its fields."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from loong.core.grammar import Grammar, GrammarKind
from loong.core.request import TokenId
from loong.server.api.errors import bad_request
from loong.server.openai.schemas import GenerationFields
from loong.server.structured.structured_outputs import (
    choice_grammar,
    regex_grammar,
    rules_grammar,
    schema_grammar,
)
from loong.server.tools.use import ToolUse


class AskedGrammar(NamedTuple):
    """A grammar, and the name of its field."""

    field: str
    grammar: Grammar


def asked_grammar(
    fields: GenerationFields, tools: ToolUse | None, eos_token_ids: Sequence[TokenId]
) -> AskedGrammar | None:
    """Return the grammar of a request, or None. A JSON grammar also allows calls of `tools`.

    Raises a 400 that names two fields if both have a grammar, or if one contradicts that a complete answer
    ends.
    """
    found = list(_asked(fields, tools))
    if not found:
        return None
    asked, *others = found
    if others:
        message = f"{others[0].field} cannot be used with {asked.field}: an answer has one grammar"
        raise bad_request(message, others[0].field)
    if not eos_token_ids:
        message = f"{asked.field} needs a model with an end-of-sequence token, which this one lacks"
        raise bad_request(message, asked.field, "unsupported_parameter")
    for name in ("ignore_eos", "min_tokens", "stop_token_ids"):
        if getattr(fields, name):
            raise bad_request(f"{name} cannot be used with {asked.field}, which says where to end", name)
    if tools is not None and not tools.is_forced and asked.grammar.kind is GrammarKind.JSON_SCHEMA:
        return AskedGrammar(asked.field, tools.grammar(or_schema=asked.grammar.text))
    return asked


def _asked(fields: GenerationFields, tools: ToolUse | None) -> Iterator[AskedGrammar]:
    if tools is not None and tools.is_forced:
        yield AskedGrammar("tool_choice", tools.grammar())
    if (grammar := fields.response_format.grammar) is not None:
        yield AskedGrammar("response_format", grammar)
    if fields.structured_outputs is not None:
        yield AskedGrammar("structured_outputs", fields.structured_outputs.source)
    if fields.guided_json is not None:
        yield AskedGrammar("guided_json", schema_grammar(fields.guided_json))
    if fields.guided_regex is not None:
        yield AskedGrammar("guided_regex", regex_grammar(fields.guided_regex))
    if fields.guided_choice is not None:
        yield AskedGrammar("guided_choice", choice_grammar(fields.guided_choice))
    if fields.guided_grammar is not None:
        yield AskedGrammar("guided_grammar", rules_grammar(fields.guided_grammar))
