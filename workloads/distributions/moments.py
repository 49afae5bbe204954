"""Means and mean squares of length distributions, and the share of documents that gives both."""

import math
from dataclasses import dataclass

from loong.core.errors import ConfigError

NUM_BISECTIONS = 60


@dataclass(frozen=True, slots=True)
class Moments:
    """The mean of a distribution of lengths, and of their squares."""

    mean: float
    square: float

    @classmethod
    def of(cls, mean: float, sd: float) -> "Moments":
        """Return those of a distribution with this mean and standard deviation."""
        return cls(mean, mean**2 + sd**2)

    @classmethod
    def of_log_normal(cls, median: float, sigma: float, low: int, high: int) -> "Moments":
        """Return those of a log-normal that is rounded to whole numbers and cut to [low, high]."""
        ends = [math.log(bound / median) / sigma for bound in (low - 0.5, high + 0.5)]

        def moment(power: int) -> float:
            below = [math.erf((end - power * sigma) / math.sqrt(2)) for end in ends]
            return median**power * math.exp((power * sigma) ** 2 / 2) * (below[1] - below[0])

        return cls(moment(1) / moment(0), moment(2) / moment(0))

    @classmethod
    def of_log_uniform(cls, low: float, high: float) -> "Moments":
        """Return those of a distribution that is uniform in the logarithm."""
        width = math.log(high / low)
        return cls((high - low) / width, (high**2 - low**2) / 2 / width)

    @property
    def sd(self) -> float:
        """Return the standard deviation."""
        return math.sqrt(self.square - self.mean**2)


@dataclass(frozen=True, slots=True)
class Documents:
    """The `share` of log-uniform documents in a mix with chats, and the length of the shortest."""

    share: float
    low: float


def documents_beside(chats: Moments, least: float, high: int, wanted: Moments) -> Documents:
    """Solve for the documents of up to `high` tokens that together with `chats` have the `wanted` moments.

    The longer the shortest document, the greater the standard deviation at the same mean, so bisection
    finds it between `least` and `high`.

    Raises:
        ConfigError: no such documents exist. Says which deviations this range and mean allow.
    """
    if not chats.mean < wanted.mean < Moments.of_log_uniform(least, high).mean:
        allowed = f"from {chats.mean:.4g} to {Moments.of_log_uniform(least, high).mean:.4g}"
        raise ConfigError(f"MEAN {wanted.mean:g} is not {allowed}, which chats and documents allow")

    def mixed(low: float) -> tuple[float, Moments]:
        documents = Moments.of_log_uniform(low, high)
        share = (wanted.mean - chats.mean) / (documents.mean - chats.mean)
        return share, Moments(wanted.mean, (1 - share) * chats.square + share * documents.square)

    low, longest = least, high * (1 - 1e-6)
    smallest, greatest = mixed(low)[1], mixed(longest)[1]
    if not smallest.square <= wanted.square <= greatest.square:
        allowed = f"from {smallest.sd:.4g} to {greatest.sd:.4g}"
        raise ConfigError(f"SD {wanted.sd:g} is not {allowed}, which this range and mean allow")
    for _ in range(NUM_BISECTIONS):
        middle = (low + longest) / 2
        if mixed(middle)[1].square < wanted.square:
            low = middle
        else:
            longest = middle
    return Documents(mixed(low)[0], low)
