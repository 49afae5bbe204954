"""Compiled grammars, and how far outputs have come in them, in the process that finds the allowed tokens."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from loong.core.grammar import Grammar
from loong.core.request import RequestId, TokenId
from loong.grammar.compiler import GrammarCompiler

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarMatcher


class MaskRow(msgspec.Struct, frozen=True):
    """A request whose next tokens are to be found, by its grammar's number.

    `token_ids` continue its output from token `start` on; 0 begins anew. `stop_token_ids` may come once the
    output is complete. It may take `seconds` of the processor's time.
    """

    request_id: RequestId
    number: int
    start: int
    token_ids: tuple[TokenId, ...]
    stop_token_ids: tuple[TokenId, ...]
    seconds: float


class Matchers:
    """The grammars over one vocabulary by number, and a matcher for each request."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Take the folder of the model's tokenizer, which is read when first needed."""
        self._folder, self._vocab_size = folder, vocab_size
        self._compiler: GrammarCompiler | None = None
        self._grammars: dict[int, CompiledGrammar] = {}
        self._matchers: dict[RequestId, GrammarMatcher] = {}

    def compile(self, number: int, grammar: Grammar) -> int:
        """Compile a grammar, and return its size in bytes. Raises what `GrammarCompiler` does."""
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._folder, self._vocab_size)
        compiled = self._grammars[number] = self._compiler.compile(grammar)
        return compiled.memory_size_bytes

    def forget(self, request_ids: Iterable[RequestId], numbers: Iterable[int]) -> None:
        """Forget requests and grammars. Requests of a forgotten grammar are among them."""
        for request_id in request_ids:
            self._matchers.pop(request_id, None)
        for number in numbers:
            self._grammars.pop(number, None)

    def fill(self, row: MaskRow, masks: NDArray[np.int32], index: int) -> None:
        """Write the tokens that may follow an output into row `index` of masks [N, V / 32], a bit each.

        Once the output is complete, only stop tokens are allowed. Raises ValueError if it does not match.
        """
        masks[index] = 0
        matcher = self._advanced(row)
        if not matcher.is_terminated() and not matcher.fill_next_token_bitmask(masks, index):
            masks[index] = -1  # it leaves the mask unchanged if all tokens are allowed

    def _advanced(self, row: MaskRow) -> "GrammarMatcher":
        """Return the request's matcher, advanced to the end of its output."""
        from xgrammar import GrammarMatcher  # an extra, and slow to import

        matcher = self._matchers.pop(row.request_id, None) if row.start else None
        if matcher is None:
            matcher = GrammarMatcher(
                self._grammars[row.number], override_stop_tokens=list(row.stop_token_ids)
            )
        for token_id in row.token_ids:
            if not matcher.accept_token(token_id):
                raise ValueError(f"its output has token {token_id}, which the grammar does not allow")
        self._matchers[row.request_id] = matcher
        return matcher
