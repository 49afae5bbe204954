"""The tokens that a stream lost, repeated or changed, against the undisturbed output."""

from collections.abc import Sequence
from dataclasses import dataclass

from loong.core.request import TokenId


@dataclass(frozen=True, slots=True)
class Differences:
    """Tokens that are missing, too many, or other ones than expected."""

    num_lost: int = 0
    num_repeated: int = 0
    num_changed: int = 0

    def __bool__(self) -> bool:
        return self != Differences()

    def __add__(self, other: "Differences") -> "Differences":
        return Differences(
            self.num_lost + other.num_lost,
            self.num_repeated + other.num_repeated,
            self.num_changed + other.num_changed,
        )

    @property
    def num_all(self) -> int:
        """Return the number of all differences."""
        return self.num_lost + self.num_repeated + self.num_changed


_LOST, _REPEATED, _CHANGED = Differences(num_lost=1), Differences(num_repeated=1), Differences(num_changed=1)


def differences(
    expected: Sequence[TokenId], received: Sequence[TokenId], *, is_complete: bool
) -> Differences:
    """Return the fewest differences that turn `expected` into `received`.

    If the stream is not complete, `received` is compared with the beginning of `expected` that it is most
    similar to: the tokens after that were never due.
    """
    num_same = _num_same(expected, received)
    rest, others = expected[num_same:], received[num_same:]
    if not others and not is_complete:
        return Differences()
    # A row has, for each beginning of `others`, the fewest differences from a beginning of `rest`.
    row = [Differences()]
    for _ in others:
        row.append(row[-1] + _REPEATED)
    ends = [row[-1]]
    for token in rest:
        new = [row[0] + _LOST]
        for index, other in enumerate(others):
            same_or_changed = row[index] if other == token else row[index] + _CHANGED
            new.append(_fewest(same_or_changed, row[index + 1] + _LOST, new[-1] + _REPEATED))
        row = new
        ends.append(row[-1])
    return ends[-1] if is_complete else min(ends, key=lambda found: (found.num_all, found.num_repeated))


def _fewest(*options: Differences) -> Differences:
    """Return the fewest differences; of equally many, those of a stream that was shifted."""
    return min(options, key=lambda found: (found.num_all, found.num_changed))


def _num_same(one: Sequence[TokenId], other: Sequence[TokenId]) -> int:
    """Return the number of tokens with which both begin."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
