"""Certain misses of a run so far, and the number that is allowed."""

from bisect import bisect_right
from dataclasses import dataclass, field
from math import inf


@dataclass(slots=True)
class Misses:
    """Counts of requests that have certainly missed their SLO, by class of prompt length.

    `edges` are the prompt lengths at which the next class begins, and `allowed` is how many of each class may
    miss. Without edges all requests are one class.
    """

    allowed: tuple[float, ...] = (inf,)
    edges: tuple[float, ...] = ()
    counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = [0] * len(self.allowed)

    def add(self, num_prompt_tokens: int) -> None:
        """Count a request that has missed."""
        self.counts[bisect_right(self.edges, num_prompt_tokens)] += 1

    @property
    def is_hopeless(self) -> bool:
        """Return whether more requests of a class have missed than allowed."""
        return any(count > allowed for count, allowed in zip(self.counts, self.allowed, strict=True))
