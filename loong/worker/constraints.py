"""Which tokens a request's schema allows next, for any request, in whatever order steps come.

What is allowed follows from the schema and the output so far alone, so it does not matter which instance
computed the output, or whether it was computed twice.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loong.core.request import RequestId, TokenId
from loong.grammar.json_grammar import GrammarCompiler

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarMatcher

logger = logging.getLogger(__name__)

_NUM_GRAMMARS = 32
_NUM_MATCHERS = 1024
_BITS = 32  # of a word of a mask


class Constraints:
    """Grammars, compiled in a thread, and how far the outputs of requests have come in theirs."""

    def __init__(self, folder: Path | None, vocab_size: int) -> None:
        """Take the folder of the model's tokenizer, which is read when first needed."""
        self._folder, self._vocab_size = folder, vocab_size
        self._compiler: GrammarCompiler | None = None
        self._thread = ThreadPoolExecutor(1)
        self._lock = Lock()
        self._grammars: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._matchers: OrderedDict[RequestId, tuple[GrammarMatcher, int]] = OrderedDict()

    def prepare(self, schema: str) -> "Future[CompiledGrammar]":
        """Begin to compile a schema's grammar, unless it is there; from any thread."""
        with self._lock:
            grammar = self._grammars.get(schema)
            if grammar is None or (grammar.done() and grammar.exception() is not None):
                self._grammars[schema] = self._thread.submit(self._compile, schema)
                if len(self._grammars) > _NUM_GRAMMARS:
                    self._grammars.popitem(last=False)
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
        """The request has ended."""
        self._matchers.pop(request_id, None)

    def _matcher(
        self,
        request_id: RequestId,
        schema: str,
        output_token_ids: Sequence[TokenId],
        stop_token_ids: Sequence[TokenId],
    ) -> "GrammarMatcher":
        """The request's, brought to the end of its output."""
        from xgrammar import GrammarMatcher  # an extra, and slow to import

        matcher, num_taken = self._matchers.pop(request_id, (None, 0))
        if matcher is None or num_taken > len(output_token_ids):
            grammar = self.prepare(schema).result()
            matcher, num_taken = GrammarMatcher(grammar, override_stop_tokens=list(stop_token_ids)), 0
        for token_id in output_token_ids[num_taken:]:
            if not matcher.accept_token(token_id):
                raise ValueError(f"its output has token {token_id}, which the schema does not allow")
        self._matchers[request_id] = matcher, len(output_token_ids)
        if len(self._matchers) > _NUM_MATCHERS:
            self._matchers.popitem(last=False)
        return matcher

    def _compile(self, schema: str) -> "CompiledGrammar":
        if self._compiler is None:
            if self._folder is None:
                raise ValueError("the workers were given no tokenizer")
            self._compiler = GrammarCompiler(self._folder, self._vocab_size)
        return self._compiler.compile(schema)
