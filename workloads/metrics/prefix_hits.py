"""The tokens of each prompt that a prefix cache would hold: of unlimited size, or of a number of tokens."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

from loong.workloads.metrics.record import RequestRecord
from loong.workloads.request import AnswerRun, PromptRun, RequestShape

Content: TypeAlias = int | None
"""The seed of a run, or None for the answer to all tokens before it."""


@dataclass(slots=True, eq=False)
class _Node:
    """The first tokens of a run that are held, and the runs that follow them by offset and content."""

    parent: "_Node | None" = None
    key: tuple[int, Content] = (0, None)
    num_tokens: int = 0
    after: "dict[tuple[int, Content], _Node]" = field(default_factory=dict)


class PrefixCache:
    """Prompts and answers as a tree of runs. Beyond `capacity` tokens, those used longest ago are evicted.

    A use of a prompt is a use of all its runs. Tokens are evicted from the end of a run that no other
    follows.
    """

    def __init__(self, capacity: float = inf) -> None:
        self.num_tokens = 0
        self._capacity = capacity
        self._root = _Node()
        self._by_use: OrderedDict[_Node, None] = OrderedDict()  # a run comes before those that it follows

    def take(self, shape: RequestShape) -> int:
        """Return how many tokens of a prompt are held, then hold the prompt and its answer.

        At least one token of a prompt is computed. The last token of an answer is never held: only a request
        that goes on after it would compute its keys and values.
        """
        num_shared, is_shared = 0, True
        node, offset = self._root, 0
        path = []
        answer = AnswerRun(shape.num_output_tokens - 1)
        for run in (*shape.prompt, answer):
            child = node.after.get((offset, _content(run)))
            if is_shared and run is not answer:
                num_held = 0 if child is None else child.num_tokens
                num_shared += min(num_held, run.num_tokens)
                is_shared = num_held >= run.num_tokens
            if run.num_tokens:
                node, offset = self._hold(node, offset, run), run.num_tokens
                path.append(node)
        for used in reversed(path):
            self._by_use.move_to_end(used)
        self._evict()
        return min(num_shared, sum(run.num_tokens for run in shape.prompt) - 1)

    def _hold(self, parent: _Node, offset: int, run: PromptRun) -> _Node:
        key = (offset, _content(run))
        node = parent.after.get(key)
        if node is None:
            node = parent.after[key] = _Node(parent, key)
            self._by_use[node] = None
        self.num_tokens += max(0, run.num_tokens - node.num_tokens)
        node.num_tokens = max(node.num_tokens, run.num_tokens)
        return node

    def _evict(self) -> None:
        while self.num_tokens > self._capacity:
            node = next(iter(self._by_use))
            num_evicted = min(node.num_tokens, self.num_tokens - int(self._capacity))
            self.num_tokens -= num_evicted
            node.num_tokens -= num_evicted
            if not node.num_tokens and node.parent is not None:
                del node.parent.after[node.key]
                del self._by_use[node]


def prefix_hits(shapes: Iterable[RequestShape], capacity: float = inf) -> Iterator[int]:
    """Yield for each prompt, in order of arrival, how many of its tokens the cache would hold.

    Without a `capacity` this is ideal: the longest common prefix, by token, of the prompt and any earlier
    prompt with its answer.
    """
    cache = PrefixCache(capacity)
    return map(cache.take, shapes)


def ideal_hits(records: Sequence[RequestRecord]) -> list[int]:
    """Return the ideal hits of the requests of a run, by the order in which they were sent."""
    order = sorted(range(len(records)), key=lambda index: records[index].sent_time)
    hits = prefix_hits(records[index].request.shape for index in order)
    return [hit for _, hit in sorted(zip(order, hits, strict=True))]


def _content(run: PromptRun) -> Content:
    return None if isinstance(run, AnswerRun) else run.seed
