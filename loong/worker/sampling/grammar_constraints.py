"""The tokens that a request's grammar allows next, for steps in any order.

They depend on the grammar and the output so far alone. So it does not matter which instance computed the
output, or whether it was computed twice. Other processes find them (`mask_processes.py`), within the time
that each request has for it.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from sys import getsizeof
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from loong.core.grammar import MASK_SECONDS_PER_TOKEN, MAX_MASK_SECONDS, Grammar
from loong.core.request import FinishReason, RequestId, TokenId
from loong.worker.sampling.mask_processes import AskedMask, FoundMask, MaskProcesses

logger = logging.getLogger(__name__)

MAX_BYTES = 2**28  # of grammars, as xgrammar counts them, with their sources
_MAX_REQUESTS = 4096  # whose time is known
_BITS = 32  # of a word of a mask
_REASONS = tuple(FinishReason)


class ConstrainedRow(NamedTuple):
    """A request with a grammar, and its output so far."""

    request_id: RequestId
    grammar: Grammar
    output_token_ids: Sequence[TokenId]
    stop_token_ids: Sequence[TokenId]


class AllowedTokens(NamedTuple):
    """The next tokens allowed, a bit each: [V / 32] int32 on the host, rounded up.

    `why_none` is the reason, if there are none.
    """

    words: Tensor
    why_none: FinishReason = FinishReason.STUCK


class _Spent(NamedTuple):
    """The processor's seconds that a request's masks have taken, and those of the last one."""

    seconds: float = 0.0
    last: float = 0.0


class Constraints:
    """Grammars, compiled in the background, and the progress of requests' outputs in them.

    The grammars used last are kept, as many as fit `max_bytes` but always the newest; a request whose grammar
    was dropped has it compiled again.
    """

    def __init__(
        self,
        masks: MaskProcesses | None,
        vocab_size: int,
        max_bytes: int = MAX_BYTES,
        broadcast: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take the processes that find tokens; None where there is no tokenizer.

        On an instance of several ranks, only the first has them. `broadcast` returns its tensor on all ranks,
        given tensors of one shape.
        """
        self._masks, self._max_bytes, self._broadcast = masks, max_bytes, broadcast
        self._num_words = -(-vocab_size // _BITS)
        self._thread = ThreadPoolExecutor(1)
        self._numbers = count()
        self._lock = Lock()  # guards all below
        self._grammars: OrderedDict[Grammar, Future[int]] = OrderedDict()  # their numbers
        self._sizes: dict[Grammar, int] = {}  # in bytes, of grammars that are compiled
        self._spent: OrderedDict[RequestId, _Spent] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all grammars that are kept, with their sources."""
        return sum(self._sizes.values())

    def prepare(self, grammar: Grammar) -> "Future[int]":
        """Begin to compile a grammar, unless it is there; from any thread. The result is its number."""
        with self._lock:
            if self._masks is None and self._broadcast is not None:  # the first rank compiles it
                done: Future[int] = Future()
                done.set_result(0)
                return done
            if grammar not in self._grammars:
                self._grammars[grammar] = self._thread.submit(self._compile, grammar)
            self._grammars.move_to_end(grammar)
            return self._grammars[grammar]

    def mask_of(self, token_ids: Sequence[TokenId]) -> Tensor:
        """Return the mask that allows these tokens, as those of `AllowedTokens`."""
        num_bits = self._num_words * _BITS
        bits = np.zeros(num_bits, dtype=np.uint8)
        bits[[token_id for token_id in token_ids if token_id < num_bits]] = 1
        return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))

    def allowed(self, rows: Sequence[ConstrainedRow]) -> list[AllowedTokens]:
        """Return the next tokens allowed after each output. One thread may call this, on all ranks together.

        No token is allowed if the grammar does not compile, or the output does not match it, or if they take
        too long to find. Once an output is complete, only stop tokens are allowed.
        """
        if self._masks is None:
            found = [self._none(FinishReason.STUCK)] * len(rows)
        else:
            found = self._find(self._masks, rows)
        if self._broadcast is None or not rows:
            return found
        received = self._broadcast(torch.stack([_encoded(allowed) for allowed in found]))
        return [_decoded(row, self._num_words) for row in received]

    def forget(self, request_id: RequestId) -> None:
        """Forget a request that has ended, or has lost its KV; from any thread."""
        with self._lock:
            self._spent.pop(request_id, None)
        if self._masks is not None:
            self._masks.forget(request_id)

    def _find(self, masks: MaskProcesses, rows: Sequence[ConstrainedRow]) -> list[AllowedTokens]:
        found: dict[int, AllowedTokens] = {}
        while len(found) < len(rows):
            asked: dict[int, AskedMask] = {}
            for index, row in enumerate(rows):
                if index in found:
                    continue
                item = self._asked(masks, row)
                if isinstance(item, FinishReason):
                    found[index] = self._none(item)
                else:
                    asked[index] = item
            if not asked:
                break
            with self._lock:
                numbers = {self._grammars[grammar].result() for grammar in self._sizes}
            items = [*asked.values()]
            filled = masks.fill(items, numbers | {item.number for item in items})
            for index, mask in zip(asked, filled, strict=False):  # the others are asked for again
                found[index] = self._taken(rows[index].request_id, mask)
        return [found[index] for index in range(len(rows))]

    def _asked(self, masks: MaskProcesses, row: ConstrainedRow) -> AskedMask | FinishReason:
        """Return what to ask of the processes, or else why no token is allowed."""
        request_id, grammar, output_token_ids, stop_token_ids = row
        with self._lock:
            spent = self._spent.get(request_id, _Spent())
        earned = MAX_MASK_SECONDS + MASK_SECONDS_PER_TOKEN * len(output_token_ids)
        seconds = min(MAX_MASK_SECONDS, earned - spent.seconds)
        if seconds <= spent.last:  # the next one is likely to take as long
            logger.warning("request %s fails: its grammar took %.1f s", request_id, spent.seconds)
            return FinishReason.COSTLY
        try:
            number = self._number(masks, grammar)
        except (ValueError, OSError) as error:
            logger.warning("request %s cannot keep to its grammar: %s", request_id, error)
            return FinishReason.STUCK
        return AskedMask(request_id, number, output_token_ids, stop_token_ids, seconds)

    def _taken(self, request_id: RequestId, mask: FoundMask) -> AllowedTokens:
        """Return the tokens of a mask, whose time is charged to its request."""
        if mask.words is None:
            logger.warning("request %s fails: its grammar took too long, or too much memory", request_id)
            return self._none(FinishReason.COSTLY)
        if mask.error is not None:
            logger.warning("request %s cannot keep to its grammar: %s", request_id, mask.error)
        with self._lock:
            spent = self._spent.pop(request_id, _Spent())
            self._spent[request_id] = _Spent(spent.seconds + mask.seconds, mask.seconds)
            if len(self._spent) > _MAX_REQUESTS:
                self._spent.popitem(last=False)
        return AllowedTokens(mask.words)

    def _none(self, why: FinishReason) -> AllowedTokens:
        return AllowedTokens(torch.zeros(self._num_words, dtype=torch.int32, device="cpu"), why)

    def _number(self, masks: MaskProcesses, grammar: Grammar) -> int:
        """Return the number of a grammar that the processes have. Raises ValueError if they cannot."""
        number = self.prepare(grammar).result()
        if not masks.has(number):
            with self._lock:
                self._drop(grammar)
            number = self.prepare(grammar).result()
        return number

    def _compile(self, grammar: Grammar) -> int:
        number = next(self._numbers)
        try:
            num_bytes = _processes(self._masks).compile(number, grammar)
        except BaseException:
            with self._lock:
                del self._grammars[grammar]  # a later attempt may succeed
            raise
        with self._lock:
            self._sizes[grammar] = num_bytes + getsizeof(grammar.text)
            while self.num_bytes > self._max_bytes and len(self._sizes) > 1:
                others = (other for other in self._grammars if other in self._sizes and other != grammar)
                self._drop(next(others))
        return number

    def _drop(self, grammar: Grammar) -> None:
        """Drop a grammar. The processes forget it before the next mask."""
        self._grammars.pop(grammar, None)
        self._sizes.pop(grammar, None)


def _processes(masks: MaskProcesses | None) -> MaskProcesses:
    if masks is None:
        raise ValueError("the workers were given no tokenizer")
    return masks


def _encoded(allowed: AllowedTokens) -> Tensor:
    """Return allowed tokens as one tensor [N] int64."""
    words = torch.nn.functional.pad(allowed.words, (0, len(allowed.words) % 2))
    reason = torch.tensor([_REASONS.index(allowed.why_none)], device="cpu")
    return torch.cat([reason, words.view(torch.int64)])


def _decoded(encoded: Tensor, num_words: int) -> AllowedTokens:
    return AllowedTokens(encoded[1:].view(torch.int32)[:num_words], _REASONS[int(encoded[0])])
