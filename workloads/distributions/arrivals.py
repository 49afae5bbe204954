"""Arrival times: at a rate, as a trace recorded them, or all at once for a closed loop."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count, repeat
from typing import TypeAlias

import numpy as np

from loong.core.errors import ConfigError
from loong.workloads.distributions.numerals import numeral

GAPS_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class Paced:
    """Requests per second; see `arrival_times` for the burstiness, and for an infinite rate."""

    rate: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError(f"a rate of {self.rate:g} is not above 0; give requests per second, or inf")
        if not self.burstiness > 0:
            raise ConfigError(
                f"a burstiness of {self.burstiness:g} is not above 0; 1 is Poisson, inf constant"
            )

    def __str__(self) -> str:
        if self.burstiness == 1:
            return f"poisson({numeral(self.rate)})"
        if math.isinf(self.burstiness):
            return f"constant({numeral(self.rate)})"
        return f"gamma({numeral(self.rate)},{numeral(self.burstiness)})"


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed loop: `concurrency` requests are in flight, and an answer lets the next one go."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(f"a concurrency of {self.concurrency} is not at least 1")

    def __str__(self) -> str:
        return f"closed({self.concurrency})"


@dataclass(frozen=True, slots=True)
class ReplayedArrivals:
    """The time stamps of a trace, `speedup` times as fast."""

    speedup: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.speedup < math.inf:
            raise ConfigError(f"a speed-up of {self.speedup:g} is not above 0; 2 is twice as fast")

    def __str__(self) -> str:
        return f"replay({numeral(self.speedup)})"


Arrivals: TypeAlias = Paced | Closed | ReplayedArrivals
AT_ONCE = Paced(math.inf)


def at_rate(arrivals: Arrivals, request_rate: float | None, burstiness: float | None) -> Arrivals:
    """Return the arrivals with another rate or burstiness, where these are not None.

    Raises:
        ConfigError: a number that is not above 0, or a burstiness for arrivals without a rate.
    """
    for flag, value in (("--request-rate", request_rate), ("--burstiness", burstiness)):
        if value is not None and not value > 0:
            raise ConfigError(f"{flag} {value:g} is not above 0")
    if request_rate is None and burstiness is None:
        return arrivals
    if isinstance(arrivals, Paced):
        changed = arrivals if burstiness is None else replace(arrivals, burstiness=burstiness)
        return changed if request_rate is None else replace(changed, rate=request_rate)
    if request_rate is None:
        raise ConfigError(
            f"--burstiness {burstiness:g} is of a rate, and {arrivals} has none; give --request-rate"
        )
    return Paced(request_rate, 1.0 if burstiness is None else burstiness)


def arrival_times(rng: np.random.Generator, request_rate: float, burstiness: float = 1.0) -> Iterator[float]:
    """Return endless arrival times in seconds after the start, ascending, the first at 0.

    Gaps are gamma distributed with mean 1 / `request_rate` and shape `burstiness`: 1 is a Poisson process,
    below 1 is burstier, above 1 steadier, and infinity is constant. An infinite rate makes everything arrive
    at 0: with a bound on concurrency at the client, that is a closed loop.
    """
    if math.isinf(request_rate):
        return repeat(0.0)
    if math.isinf(burstiness):
        return (index / request_rate for index in count())
    scale = 1.0 / (request_rate * burstiness)
    gaps = chain.from_iterable(rng.gamma(burstiness, scale, GAPS_AT_ONCE).tolist() for _ in repeat(None))
    return accumulate(gaps, initial=0.0)
