"""When requests arrive: open loops at a rate, or everything at once for a closed loop."""

import math

import numpy as np

from loong.core.errors import ConfigError


def arrival_times(
    rng: np.random.Generator, num_requests: int, request_rate: float, burstiness: float = 1.0
) -> list[float]:
    """Return seconds after the start at which requests arrive, the first at 0, never descending.

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
        return [0.0] * num_requests
    if math.isinf(burstiness):
        return [index / request_rate for index in range(num_requests)]
    gaps = rng.gamma(burstiness, 1.0 / (request_rate * burstiness), size=max(num_requests - 1, 0))
    return [0.0, *np.cumsum(gaps).tolist()][:num_requests]
