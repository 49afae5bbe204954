"""Grammars that the output of a request is held to."""

from dataclasses import dataclass
from enum import Enum

# Finding the tokens that a grammar allows next may take this much of the processor's time, for one token and
# for all tokens of an answer: `MAX_MASK_SECONDS`, and so much more for each token.
MAX_MASK_SECONDS = 1.0
MASK_SECONDS_PER_TOKEN = 0.01


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


# The first grammar of JSON, and the first of any text, need the model's tokens to be read, each in its way.
# These are made before a client sends one.
FIRST_GRAMMARS = (
    Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
    Grammar(GrammarKind.CHOICE, '["a"]'),
)
