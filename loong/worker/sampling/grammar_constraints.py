"""The tokens that a request's grammar allows next, for steps in any order.

They depend on the grammar and the output so far alone. So it does not matter which instance computed the
output, or whether it was computed twice.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from sys import getsizeof
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from loong.core.grammar import Grammar
from loong.core.request import RequestId, TokenId
from loong.grammar.compiler import GrammarCompiler

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarMatcher

logger = logging.getLogger(__name__)

MAX_BYTES = 2**28  # of grammars, as xgrammar counts them, with their sources
NUM_MATCHERS = 1024
_BITS = 32  # of a word of a mask


@dataclass(frozen=True, slots=True)
class _Progress:
    """The progress of a request's output in its grammar."""

    grammar: Grammar
    matcher: "GrammarMatcher"
    num_tokens: int


class Constraints:
    """Grammars, compiled in a thread, and the progress of requests' outputs in them.

    The grammars used last are kept, as many as fit `max_bytes` but always the newest; a request whose grammar
    was dropped has it compiled again.
    """

    def __init__(self, folder: Path | None, vocab_size: int, max_bytes: int = MAX_BYTES) -> None:
        """Take the folder of the model's tokenizer, which is read when first needed."""
        self._folder, self._vocab_size, self._max_bytes = folder, vocab_size, max_bytes
        self._compiler: GrammarCompiler | None = None
        self._thread = ThreadPoolExecutor(1)
        self._lock = Lock()  # guards all below
        self._grammars: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._sizes: dict[Grammar, int] = {}  # in bytes, of grammars that are compiled
        self._progress: OrderedDict[RequestId, _Progress] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all grammars that are kept, with their sources."""
        return sum(self._sizes.values())

    def prepare(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        """Begin to compile a grammar, unless it is there; from any thread."""
        with self._lock:
            if grammar not in self._grammars:
                self._grammars[grammar] = self._thread.submit(self._compile, grammar)
            self._grammars.move_to_end(grammar)
            return self._grammars[grammar]

    def mask_of(self, token_ids: Sequence[TokenId]) -> Tensor:
        """Return the mask that allows these tokens, as `allowed` does."""
        bits = np.zeros(-(-self._vocab_size // _BITS) * _BITS, dtype=np.uint8)
        bits[[token_id for token_id in token_ids if token_id < self._vocab_size]] = 1
        return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))

    def allowed(
        self,
        request_id: RequestId,
        grammar: Grammar,
        output_token_ids: Sequence[TokenId],
        stop_token_ids: Sequence[TokenId],
    ) -> Tensor:
        """Return the next tokens allowed after an output, a bit each: [V / 32] int32 on the host, rounded up.

        No token is allowed if the grammar does not compile, or the output does not match it. Once the output
        is complete, only stop tokens are allowed. One thread may call this.
        """
        words = torch.zeros(1, -(-self._vocab_size // _BITS), dtype=torch.int32)
        try:
            matcher = self._matcher(request_id, grammar, output_token_ids, stop_token_ids)
        except (RuntimeError, ValueError, OSError, ImportError) as error:
            logger.warning("request %s cannot keep to its grammar: %s", request_id, error)
            return words[0]
        if matcher.is_terminated():
            return words[0]
        if not matcher.fill_next_token_bitmask(words):
            words.fill_(-1)  # it leaves the mask unchanged if all tokens are allowed
        return words[0]

    def forget(self, request_id: RequestId) -> None:
        """Forget a request that has ended, or has lost its KV; from any thread."""
        with self._lock:
            self._progress.pop(request_id, None)

    def _matcher(
        self,
        request_id: RequestId,
        grammar: Grammar,
        output_token_ids: Sequence[TokenId],
        stop_token_ids: Sequence[TokenId],
    ) -> "GrammarMatcher":
        """Return the request's matcher, advanced to the end of its output."""
        from xgrammar import GrammarMatcher  # an extra, and slow to import

        compiled = self.prepare(grammar).result()
        with self._lock:
            progress = self._progress.pop(request_id, None)
        if progress is None or progress.num_tokens > len(output_token_ids):
            matcher = GrammarMatcher(compiled, override_stop_tokens=list(stop_token_ids))
            progress = _Progress(grammar, matcher, 0)
        for token_id in output_token_ids[progress.num_tokens :]:
            if not progress.matcher.accept_token(token_id):
                raise ValueError(f"its output has token {token_id}, which the grammar does not allow")
        with self._lock:
            if grammar in self._grammars:  # otherwise it has been dropped
                self._progress[request_id] = _Progress(grammar, progress.matcher, len(output_token_ids))
            if len(self._progress) > NUM_MATCHERS:
                self._progress.popitem(last=False)
        return progress.matcher

    def _compile(self, grammar: Grammar) -> "CompiledGrammar":
        try:
            compiled = self._grammar_compiler().compile(grammar)
        except BaseException:
            with self._lock:
                del self._grammars[grammar]  # a later attempt may succeed
            raise
        with self._lock:
            self._sizes[grammar] = compiled.memory_size_bytes + getsizeof(grammar.text)
            while self.num_bytes > self._max_bytes and len(self._sizes) > 1:
                others = (other for other in self._grammars if other in self._sizes and other != grammar)
                self._drop(next(others))
        return compiled

    def _grammar_compiler(self) -> GrammarCompiler:
        if self._compiler is None:
            if self._folder is None:
                raise ValueError("the workers were given no tokenizer")
            self._compiler = GrammarCompiler(self._folder, self._vocab_size)
        return self._compiler

    def _drop(self, grammar: Grammar) -> None:
        """Drop a grammar, and the matchers that hold it."""
        del self._grammars[grammar], self._sizes[grammar]
        for request_id in [i for i, progress in self._progress.items() if progress.grammar == grammar]:
            del self._progress[request_id]
