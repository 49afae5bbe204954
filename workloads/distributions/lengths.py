"""Distributions of lengths in tokens: bounded, seeded, drawn many at a time."""

import math

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]


def log_normal(
    rng: np.random.Generator, size: int, *, median: float, sigma: float, low: int, high: int
) -> Lengths:
    """Draw `size` lengths of a log-normal cut to [low, high], with no heap at either end.

    `median` is in tokens and belongs to the uncut distribution, `sigma` to its logarithm.
    """
    lengths = np.zeros(size, dtype=np.int64)
    outside = np.ones(size, dtype=np.bool_)
    while outside.any():
        drawn = rng.lognormal(math.log(median), sigma, int(outside.sum()))
        lengths[outside] = np.rint(drawn).astype(np.int64)
        outside = (lengths < low) | (lengths > high)
    return lengths


def log_uniform(rng: np.random.Generator, size: int, *, low: float, high: int) -> Lengths:
    """Draw `size` lengths in [low, high], uniform in the logarithm."""
    drawn = np.exp(rng.uniform(math.log(low), math.log(high), size))
    return np.clip(np.rint(drawn), low, high).astype(np.int64)


def uniform(rng: np.random.Generator, size: int, *, low: int, high: int) -> Lengths:
    """Draw `size` lengths in [low, high], all equally likely."""
    return rng.integers(low, high, size, endpoint=True)


def beta(rng: np.random.Generator, size: int, *, low: int, high: int, mean: float, sd: float) -> Lengths:
    """Draw `size` lengths of the beta distribution on [low, high] that has this mean and standard deviation.

    It exists if sd^2 < (mean - low) * (high - mean), which the caller checks.
    """
    middle, variance = (mean - low) / (high - low), (sd / (high - low)) ** 2
    concentration = middle * (1 - middle) / variance - 1
    drawn = rng.beta(middle * concentration, (1 - middle) * concentration, size)
    return np.rint(low + drawn * (high - low)).astype(np.int64)


def zipf(rng: np.random.Generator, size: int, *, alpha: float, offset: float, low: int, high: int) -> Lengths:
    """Draw `size` lengths in [low, high], length x with weight 1 / (x + offset)^alpha."""
    lengths = np.arange(low, high + 1, dtype=np.int64)
    weights = (lengths + offset) ** -alpha
    return rng.choice(lengths, size=size, p=weights / weights.sum())
