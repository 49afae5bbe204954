"""Where the highest rate that attains lies, from attempts at any rates, several of them at once."""

from dataclasses import dataclass, field
from math import exp, inf, log, sqrt
from typing import Protocol

MAX_ATTEMPTS = 12  # all of which attain, or none of which does: beyond, the rate decides nothing
LONGEST_STEP = 2.0  # from one rate to the next, as a factor
ROUNDING = 1e-12  # of a rate


@dataclass(slots=True)
class Attempts:
    """Which rates attained."""

    attains: dict[float, bool] = field(default_factory=dict)

    @property
    def too_high(self) -> float | None:
        """The lowest rate that does not attain; None if all do."""
        return min((rate for rate, attains in self.attains.items() if not attains), default=None)

    @property
    def rate(self) -> float | None:
        """The highest rate below it that attains; None if none does."""
        limit = self.too_high
        attained = (rate for rate, attains in self.attains.items() if attains)
        return max((rate for rate in attained if limit is None or rate < limit), default=None)


class Search(Protocol):
    """Says which rates to attempt."""

    attempts: Attempts

    @property
    def is_found(self) -> bool:
        """Whether what is known is a goodput."""

    def next_rates(self) -> tuple[float, ...]:
        """What to try at once, the most telling first; nothing if the search is over."""


@dataclass(slots=True)
class RateSearch:
    """What to try next: `first`, then farther off, twice as far with each step.

    The goodput is found where a rate attains and one higher by no more than `precision`, relative, does not.
    Steps from a `first` rate that is only a guess are long at once.
    """

    first: float
    precision: float
    is_guess: bool = False
    attempts: Attempts = field(default_factory=Attempts)

    @property
    def is_found(self) -> bool:
        """Whether the goodput is found, or given up."""
        return not self.next_rates()

    def next_rates(self) -> tuple[float, ...]:
        """What to try at once, the most telling first; nothing if the search is over."""
        least = LONGEST_STEP if self.is_guess else 1 + self.precision
        num_attempts = len(self.attempts.attains)
        if not num_attempts:
            return self.first, self.first * least
        low, high = self.attempts.rate, self.attempts.too_high
        if low is not None and high is not None:
            return self._between(low, high)
        if num_attempts > MAX_ATTEMPTS:
            return ()
        step = exp(min(log(least) * 2 ** (num_attempts - 1), log(LONGEST_STEP)))
        farther = min(step**2, LONGEST_STEP)
        if low is not None:
            return low * step, low * step * farther
        assert high is not None, "there were attempts"
        return high / step, high / step / farther

    def _between(self, low: float, high: float) -> tuple[float, ...]:
        if high <= low * (1 + self.precision) * (1 + ROUNDING):
            return ()
        if high <= low * (1 + self.precision) ** 2 * (1 + ROUNDING):
            return (sqrt(low * high),)
        third = (high / low) ** (1 / 3)
        return low * third, low * third**2


@dataclass(slots=True)
class CommonRates:
    """Only given rates, the same for all who are compared.

    What attains is taken to do so at any lower rate, and what does not, to fail at any higher one.
    """

    rates: tuple[float, ...]
    attempts: Attempts = field(default_factory=Attempts)
    is_found: bool = False

    def next_rates(self) -> tuple[float, ...]:
        """The middle one of those of which nothing is known."""
        low, high = self.attempts.rate or 0.0, self.attempts.too_high or inf
        unknown = [rate for rate in sorted(self.rates) if low < rate < high]
        return (unknown[len(unknown) // 2],) if unknown else ()
