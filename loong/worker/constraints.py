"""Which tokens a request's schema allows next, for any request, in whatever order steps come.

What is allowed follows from the schema and the output so far alone, so it does not matter which instance
computed the output, or whether it was computed twice.
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

import torch
from torch import Tensor

from loong.core.request import RequestId, TokenId
from loong.grammar.json_grammar import GrammarCompiler

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarMatcher

logger = logging.getLogger(__name__)

MAX_BYTES = 2**28  # of grammars, as xgrammar counts them, with their schemas
NUM_MATCHERS = 1024
_BITS = 32  # of a word of a mask


@dataclass(frozen=True, slots=True)
class _Progress:
    """How far a request's output has come in the grammar of its schema."""

    schema: str
    matcher: "GrammarMatcher"
    num_tokens: int


class Constraints:
    """Grammars, compiled in a thread, and how far the outputs of requests have come in theirs.

    The grammars used last are kept, as many as fit `max_bytes` but always the newest; a request whose grammar
    was dropped has it compiled again.
    """

    def __init__(self, folder: Path | None, vocab_size: int, max_bytes: int = MAX_BYTES) -> None:
        """Take the folder of the model's tokenizer, which is read when first needed."""
        self._folder, self._vocab_size, self._max_bytes = folder, vocab_size, max_bytes
        self._compiler: GrammarCompiler | None = None
        self._thread = ThreadPoolExecutor(1)
        self._lock = Lock()  # guards all below
        self._grammars: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._sizes: dict[str, int] = {}  # in bytes, of grammars that are compiled
        self._progress: OrderedDict[RequestId, _Progress] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all grammars that are kept, with their schemas."""
        return sum(self._sizes.values())

    def prepare(self, schema: str) -> "Future[CompiledGrammar]":
        """Begin to compile a schema's grammar, unless it is there; from any thread."""
        with self._lock:
            if schema not in self._grammars:
                self._grammars[schema] = self._thread.submit(self._compile, schema)
            self._grammars.move_to_end(schema)
            return self._grammars[schema]

    def allowed(
        self,
        request_id: RequestId,
        schema: str,
        output_token_ids: Sequence[TokenId],
        stop_token_ids: Sequence[TokenId],
    ) -> Tensor:
        """The next tokens allowed after an output, a bit each: [V / 32] int32 on the host, rounded up.

        None are where no grammar can be made, or the output is not of it. Once the output is whole,
        only the tokens that stop are. One thread may call this.
        """
        words = torch.zeros(1, -(-self._vocab_size // _BITS), dtype=torch.int32)
        try:
            matcher = self._matcher(request_id, schema, output_token_ids, stop_token_ids)
        except (RuntimeError, ValueError, OSError, ImportError) as error:
            logger.warning("request %s cannot keep to its schema: %s", request_id, error)
            return words[0]
        if matcher.is_terminated():
            return words[0]
        if not matcher.fill_next_token_bitmask(words):
            words.fill_(-1)  # it leaves the mask as it was where all are allowed
        return words[0]

    def forget(self, request_id: RequestId) -> None:
        """The request has ended, or has lost its KV; from any thread."""
        with self._lock:
            self._progress.pop(request_id, None)

    def _matcher(
        self,
        request_id: RequestId,
        schema: str,
        output_token_ids: Sequence[TokenId],
        stop_token_ids: Sequence[TokenId],
    ) -> "GrammarMatcher":
        """The request's, brought to the end of its output."""
        from xgrammar import GrammarMatcher  # an extra, and slow to import

        grammar = self.prepare(schema).result()
        with self._lock:
            progress = self._progress.pop(request_id, None)
        if progress is None or progress.num_tokens > len(output_token_ids):
            matcher = GrammarMatcher(grammar, override_stop_tokens=list(stop_token_ids))
            progress = _Progress(schema, matcher, 0)
        for token_id in output_token_ids[progress.num_tokens :]:
            if not progress.matcher.accept_token(token_id):
                raise ValueError(f"its output has token {token_id}, which the schema does not allow")
        with self._lock:
            if schema in self._grammars:  # else it was dropped meanwhile
                self._progress[request_id] = _Progress(schema, progress.matcher, len(output_token_ids))
            if len(self._progress) > NUM_MATCHERS:
                self._progress.popitem(last=False)
        return progress.matcher

    def _compile(self, schema: str) -> "CompiledGrammar":
        try:
            grammar = self._grammar_compiler().compile(schema)
        except BaseException:
            with self._lock:
                del self._grammars[schema]  # at another time it may succeed
            raise
        with self._lock:
            self._sizes[schema] = grammar.memory_size_bytes + getsizeof(schema)
            while self.num_bytes > self._max_bytes and len(self._sizes) > 1:
                others = (other for other in self._grammars if other in self._sizes and other != schema)
                self._drop(next(others))
        return grammar

    def _grammar_compiler(self) -> GrammarCompiler:
        if self._compiler is None:
            if self._folder is None:
                raise ValueError("the workers were given no tokenizer")
            self._compiler = GrammarCompiler(self._folder, self._vocab_size)
        return self._compiler

    def _drop(self, schema: str) -> None:
        """Drop a grammar, and the matchers that hold it."""
        del self._grammars[schema], self._sizes[schema]
        for request_id in [i for i, progress in self._progress.items() if progress.schema == schema]:
            del self._progress[request_id]
