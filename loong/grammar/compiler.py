"""Compiles grammars over a model's tokens with xgrammar."""

import random
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import msgspec

from loong.core.errors import InvalidRequestError
from loong.core.grammar import Grammar, GrammarKind
from loong.grammar.pattern import num_repetitions
from loong.grammar.schema import MAX_REPETITIONS, supported
from loong.grammar.structural_tag import with_supported_schemas
from loong.grammar.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar
    from xgrammar import GrammarCompiler as Compiler

_MAX_BLANKS = 16  # in a row between JSON tokens: some models would write only blanks
_NUM_TRIED = 512  # tokens; an ambiguous grammar becomes slow within this number


class GrammarCompiler:
    """The grammars over one vocabulary. It takes a second to set up, and milliseconds for each grammar."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Read the tokenizer of a model folder for JSON. Other grammars read it ahead or at need."""
        self._folder, self._vocab_size = folder, vocab_size
        self._of_json = self._compiler(is_json=True)
        self._of_text: Compiler | None = None

    def compile(self, grammar: Grammar) -> "CompiledGrammar":
        """Return the grammar over tokens.

        Raises `InvalidRequestError` for an unsupported grammar, and RuntimeError for one that cannot be
        parsed.
        """
        text = grammar.text
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                schema = msgspec.json.encode(supported(msgspec.json.decode(text))).decode()
                return self._of_json.compile_json_schema(
                    schema, strict_mode=False, max_whitespace_cnt=_MAX_BLANKS
                )
            case GrammarKind.STRUCTURAL_TAG:
                tag = with_supported_schemas(msgspec.json.decode(text), _MAX_BLANKS)
                return self._of_json.compile_structural_tag(msgspec.json.encode(tag).decode())
            case GrammarKind.REGEX:
                _check_repetitions(text)
                return self._text_compiler().compile_regex(text)
            case GrammarKind.CHOICE:
                choices = msgspec.json.decode(text, type=list[str])
                return self._text_compiler().compile_grammar(f"root ::= {' | '.join(map(_quoted, choices))}")
            case GrammarKind.EBNF:
                _check_repetitions(text)
                return self._text_compiler().compile_grammar(text)
            case GrammarKind.LARK:
                _check_repetitions(text)
                return self._text_compiler().compile_lark(text)
            case _:
                assert_never(grammar.kind)

    def read_ahead(self) -> None:
        """Read the tokenizer for grammars other than JSON too."""
        self._text_compiler()

    def _text_compiler(self) -> "Compiler":
        if self._of_text is None:
            self._of_text = self._compiler(is_json=False)
        return self._of_text

    def _compiler(self, *, is_json: bool) -> "Compiler":
        import xgrammar  # an extra, and slow to import

        # No cache here: callers keep compiled grammars, and a second cache would double the memory.
        vocabulary = read_vocabulary(self._folder, self._vocab_size, is_json=is_json)
        return xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)


def allows_anything(grammar: "CompiledGrammar", vocab_size: int) -> bool:
    """Return whether the grammar allows any answer, even an empty one. A rule that only contains itself has
    none.

    It continues with random tokens, so that a grammar with slow steps takes its time here, and not in a batch
    with other requests.
    """
    from xgrammar import GrammarMatcher, allocate_token_bitmask

    mask, end = allocate_token_bitmask(1, vocab_size), vocab_size - 1  # any token can serve as the end
    matcher = GrammarMatcher(grammar, override_stop_tokens=[end])
    draw = random.Random(0)  # noqa: S311  no secret is drawn
    for index in range(_NUM_TRIED):
        if not matcher.fill_next_token_bitmask(mask):
            return True
        if not mask.any():
            return index > 0
        words = mask[0].nonzero().flatten()
        number = int(words[draw.randrange(len(words))])
        word = int(mask[0, number])
        token_ids = [
            token_id for bit in range(32) if word >> bit & 1 and (token_id := 32 * number + bit) < end
        ]
        if token_ids:
            matcher.accept_token(draw.choice(token_ids))
    return True


def _check_repetitions(text: str) -> None:
    if (count := num_repetitions(text)) > MAX_REPETITIONS:
        raise InvalidRequestError(
            f"parts are repeated {count} times, but at most {MAX_REPETITIONS} are allowed"
        )


def _quoted(text: str) -> str:
    """Return a text as an EBNF literal."""
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    return character if character.isalnum() or character == " " else f"\\U{ord(character):08x}"
