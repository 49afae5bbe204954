"""When requests arrive: open loops at a rate, or everything at once for a closed loop."""

import math
from collections.abc import Iterator
from itertools import accumulate, chain, count, repeat

import numpy as np

from loong.core.errors import ConfigError

GAPS_AT_ONCE = 1_000


def arrival_times(rng: np.random.Generator, request_rate: float, burstiness: float = 1.0) -> Iterator[float]:
    """Return seconds after the start at which requests arrive, without end, the first at 0, never descending.

    Gaps are gamma distributed with mean 1 / `request_rate` and shape `burstiness`: 1 is a Poisson process,
    below 1 is burstier, above 1 steadier, and infinity is constant. An infinite rate makes everything
    arrive at 0: with a bound on concurrency at the client, that is a closed loop.

    Raises:
        ConfigError: a rate or burstiness that is not above 0.
    """
    if not request_rate > 0:
        raise ConfigError(f"--request-rate {request_rate:g} is not above 0; give requests per second, or inf")
    if not burstiness > 0:
        raise ConfigError(f"--burstiness {burstiness:g} is not above 0; 1 is Poisson, inf is constant")
    if math.isinf(request_rate):
        return repeat(0.0)
    if math.isinf(burstiness):
        return (index / request_rate for index in count())
    scale = 1.0 / (request_rate * burstiness)
    gaps = chain.from_iterable(rng.gamma(burstiness, scale, GAPS_AT_ONCE).tolist() for _ in repeat(None))
    return accumulate(gaps, initial=0.0)
