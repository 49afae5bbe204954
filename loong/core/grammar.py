"""Grammars that the output of a request is held to."""

from dataclasses import dataclass
from enum import Enum


class GrammarKind(Enum):
    """The notation of a grammar."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "ebnf"
    LARK = "lark"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar by its source: a JSON schema, a regular expression, a JSON list of texts, or rules.

    A structural tag is JSON as xgrammar reads it: schemas and the texts around them.

    Rules are written in the EBNF of GBNF files, whose first rule is named `root`, or in Lark's notation,
    whose first rule is named `start`.
    """

    kind: GrammarKind
    text: str
