"""Counts the tokens of each prompt that an earlier prompt has sent."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from loong.workloads.request import RequestShape, TokenRun


@dataclass(slots=True)
class _Node:
    """A node of the tree of token runs: the next runs by seed and length."""

    after: "dict[int, dict[int, _Node]]" = field(default_factory=dict)

    def shared(self, run: TokenRun) -> int:
        """Return the number of tokens of `run` that earlier prompts had here."""
        lengths = self.after.get(run.seed, {})
        return min(max(lengths, default=0), run.num_tokens)

    def then(self, run: TokenRun) -> "_Node | None":
        return self.after.get(run.seed, {}).get(run.num_tokens)

    def add(self, run: TokenRun) -> "_Node":
        return self.after.setdefault(run.seed, {}).setdefault(run.num_tokens, _Node())


def shared_tokens(shapes: Iterable[RequestShape]) -> Iterator[int]:
    """Yield for each prompt how many of its first tokens an earlier prompt has.

    Two prompts share their equal first runs. Of the next runs they share the shorter one if both have one
    seed.
    """
    root = _Node()
    for shape in shapes:
        yield _shared(root, shape.prompt)
        node = root
        for run in shape.prompt:
            node = node.add(run)


def _shared(root: _Node, prompt: tuple[TokenRun, ...]) -> int:
    total = 0
    node: _Node | None = root
    for run in prompt:
        if node is None:
            break
        shared = node.shared(run)
        total += shared
        node = node.then(run)
        if shared < run.num_tokens:
            break
    return total
