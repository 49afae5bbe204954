"""The choice of the engine that gets a request: the one with the least work before its first token."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

BLOCK_TOKENS = 16  # of prefixes that are remembered: a shared prefix counts as whole blocks of it
EXPECTED_OUTPUT = 64  # tokens of work that a choice counts as at most: most end long before their maximum


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine that serves, as the router sees it for one prompt. All numbers are tokens.

    `num_outstanding` is the work of its open requests. It most likely has `num_cached` tokens of the prompt,
    and `num_remembered` in all. A request of more than `max_request_kv` does not fit.
    """

    engine_id: int
    num_outstanding: int
    num_cached: int
    num_remembered: int
    max_request_kv: int


def chosen_engine(loads: Sequence[EngineLoad], num_prompt_tokens: int, num_final_tokens: int) -> EngineLoad:
    """Return the engine for a prompt, of one or more.

    It has the least work: what is open there, and what it must compute of this prompt. Of equal ones it is
    the one with more of the prompt, and then the one that remembers least. `num_final_tokens` is the KV of
    the request at its end: engines without room for it come last.
    """

    def order(load: EngineLoad) -> tuple[bool, int, int, int, int]:
        work = load.num_outstanding + num_prompt_tokens - load.num_cached
        is_too_small = load.max_request_kv < num_final_tokens
        return is_too_small, work, -load.num_cached, load.num_remembered, load.engine_id

    return min(loads, key=order)


def output_work(max_tokens: int, num_choices: int) -> int:
    """Return the work that the output of a request counts as, in tokens."""
    return num_choices * min(max_tokens, EXPECTED_OUTPUT)


class RememberedPrefixes:
    """The blocks of tokens that an engine has computed lately, at most `max_tokens` in all.

    A block is known by a hash of all tokens up to its end. Hashes that collide cost time, and nothing else.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_blocks = max_tokens // BLOCK_TOKENS
        self._blocks: dict[int, None] = {}  # the least recently used first

    @property
    def num_tokens(self) -> int:
        """The number of remembered tokens."""
        return len(self._blocks) * BLOCK_TOKENS

    def num_cached(self, blocks: Sequence[int]) -> int:
        """Return how many of the first tokens of a prompt are remembered."""
        return BLOCK_TOKENS * sum(1 for _ in takewhile(self._blocks.__contains__, blocks))

    def remember(self, blocks: Sequence[int]) -> None:
        """Remember a prompt. Its beginning is forgotten last."""
        for block in reversed(blocks[: self._max_blocks]):
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > self._max_blocks:
            del self._blocks[next(iter(self._blocks))]

    def forget(self) -> None:
        """Forget all."""
        self._blocks.clear()


def blocks_of(salt: str, token_ids: Sequence[int], known: Sequence[int] = ()) -> list[int]:
    """Return the whole blocks of a prompt, each as a hash of the salt and of all tokens up to its end.

    The first of them may be `known`.
    """
    blocks, last = list(known), known[-1] if known else hash(salt)
    for start in range(len(known) * BLOCK_TOKENS, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        last = hash((last, tuple(token_ids[start : start + BLOCK_TOKENS])))
        blocks.append(last)
    return blocks
