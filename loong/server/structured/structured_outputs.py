"""Fields with a grammar for the answer: OpenAI's `response_format`, and those that vLLM adds."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

import msgspec
from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import from_json

from loong.core.grammar import Grammar, GrammarKind
from loong.server.api.schema_base import Schema
from loong.server.structured.free_json import FreeObject

MAX_ALTERNATIVES = 1024
MAX_SOURCE_LENGTH = 2**16  # characters
_ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')


def _as_object(value: object) -> object:
    """Return the object in a JSON text. Raises ValueError for other texts."""
    try:
        return from_json(value, allow_inf_nan=False) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"its text is not valid JSON: {error}") from error


JsonSchema: TypeAlias = Annotated[FreeObject, BeforeValidator(_as_object, str | FreeObject)]
Alternatives: TypeAlias = Annotated[list[str], Field(min_length=1, max_length=MAX_ALTERNATIVES)]
Source: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_SOURCE_LENGTH)]


class JsonSchemaFormat(Schema):
    """A JSON schema, and its name."""

    name: Annotated[str, Field(max_length=256)] = ""
    description: str | None = None
    schema_: Annotated[FreeObject, Field(alias="schema")]
    """Unsupported parts are refused by name. An object that names properties has no others unless
    `additionalProperties` says so. Formats are checked by pattern."""
    strict: bool | None = None
    """Answers always follow the schema."""


class ResponseFormat(Schema):
    """The format of an answer: free, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _names_a_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and with no other")
        return self

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the answer, or None."""
        if self.json_schema is not None:
            return schema_grammar(self.json_schema.schema_)
        return _ANY_OBJECT if self.type == "json_object" else None


class StructuredOutputs(Schema):
    """One grammar for the answer, in one of vLLM's notations."""

    json_: Annotated[JsonSchema | None, Field(alias="json")] = None
    """A JSON schema, as an object or as text."""
    json_object: bool = False
    """Any JSON object."""
    regex: Source | None = None
    """A regular expression that the whole answer matches. It has no lookaround, flags or back references."""
    choice: Alternatives | None = None
    """The answer is one of these texts."""
    grammar: Source | None = None
    """Rules, in the EBNF of GBNF files (`root ::= ...`), or in Lark's notation (`start: ...`)."""
    disable_fallback: bool = False
    """No effect, because there is one implementation of grammars."""
    disable_any_whitespace: Literal[False] = False
    disable_additional_properties: Literal[False] = False

    @model_validator(mode="after")
    def _is_one_grammar(self) -> Self:
        names = list(self._grammars())
        if not names:
            raise ValueError("needs one of json, regex, choice, grammar and json_object")
        if len(names) > 1:
            raise ValueError(f"{names[1]} cannot be used with {names[0]}: an answer has one grammar")
        return self

    @property
    def source(self) -> Grammar:
        """The one grammar."""
        (grammar,) = self._grammars().values()
        return grammar

    def _grammars(self) -> dict[str, Grammar]:
        """Return the grammars that are set, by field name."""
        found = {
            "json": None if self.json_ is None else schema_grammar(self.json_),
            "regex": None if self.regex is None else regex_grammar(self.regex),
            "choice": None if self.choice is None else choice_grammar(self.choice),
            "grammar": None if self.grammar is None else rules_grammar(self.grammar),
            "json_object": _ANY_OBJECT if self.json_object else None,
        }
        return {name: grammar for name, grammar in found.items() if grammar is not None}


def schema_grammar(schema: dict[str, Any]) -> Grammar:
    """Return the grammar of a JSON schema."""
    return Grammar(GrammarKind.JSON_SCHEMA, msgspec.json.encode(schema).decode())


def regex_grammar(pattern: str) -> Grammar:
    """Return the grammar of a regular expression."""
    return Grammar(GrammarKind.REGEX, pattern)


def choice_grammar(texts: Sequence[str]) -> Grammar:
    """Return the grammar whose answers are these texts."""
    return Grammar(GrammarKind.CHOICE, msgspec.json.encode(texts).decode())


def rules_grammar(rules: str) -> Grammar:
    """Return the grammar of rules. Rules with `::=` are EBNF, others are in Lark's notation."""
    return Grammar(GrammarKind.EBNF if "::=" in rules else GrammarKind.LARK, rules)
