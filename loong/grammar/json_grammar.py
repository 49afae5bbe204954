"""Grammars of JSON that a schema allows, over a model's tokens."""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from loong.grammar.schema import supported
from loong.grammar.structural_tag import is_structural_tag, with_supported_schemas
from loong.grammar.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

_MAX_BLANKS = 16  # in a row between tokens of JSON: some models would write nothing else


class GrammarCompiler:
    """Makes grammars for one vocabulary. Takes a second to make, and milliseconds a grammar."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Read the tokenizer of a model folder."""
        import xgrammar  # an extra, and slow to import

        # Who needs a grammar twice keeps it: two caches would hold two bounds' worth.
        self._compiler = xgrammar.GrammarCompiler(
            read_vocabulary(folder, vocab_size), max_threads=1, cache_enabled=False
        )

    def compile(self, schema: str) -> "CompiledGrammar":
        """The grammar of a JSON schema, or of a structural tag, which has schemas within.

        Raises `UnsupportedSchemaError` for one that it could not keep to, RuntimeError for one that is none.
        """
        content = msgspec.json.decode(schema)
        if is_structural_tag(content):
            tag = with_supported_schemas(content, _MAX_BLANKS)
            return self._compiler.compile_structural_tag(msgspec.json.encode(tag).decode())
        text = msgspec.json.encode(supported(content)).decode()
        return self._compiler.compile_json_schema(text, strict_mode=False, max_whitespace_cnt=_MAX_BLANKS)


def allows_anything(grammar: "CompiledGrammar", vocab_size: int) -> bool:
    """Whether any token may begin an answer: none may if a schema is nothing but itself."""
    from xgrammar import GrammarMatcher, allocate_token_bitmask

    mask = allocate_token_bitmask(1, vocab_size)
    matcher = GrammarMatcher(grammar, terminate_without_stop_token=True)
    return not matcher.fill_next_token_bitmask(mask) or bool(mask.any())
