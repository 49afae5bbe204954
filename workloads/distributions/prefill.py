"""The time of an unloaded prefill, fitted to a few measured points."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PrefillFit:
    """Seconds of an unloaded prefill of n tokens: constant + linear x n + quadratic x n^2."""

    constant: float
    linear: float
    quadratic: float

    def describe(self) -> str:
        """Return the formula with its units, for a report."""
        return (
            f"{self.constant * 1e3:.3g} ms + {self.linear * 1e6:.3g} us x n + "
            f"{self.quadratic * 1e9:.3g} ns x n^2"
        )

    def __call__(self, num_prompt_tokens: int) -> float:
        """Return the predicted seconds."""
        return self.constant + (self.linear + self.quadratic * num_prompt_tokens) * num_prompt_tokens


def fit_prefill(num_prompt_tokens: Sequence[int], seconds: Sequence[float]) -> PrefillFit:
    """Fit the three coefficients to measured points, none negative, least squares of the relative error.

    Three unknowns have eight sets of non-zero coefficients, so the best feasible one is found by trying all.
    """
    tokens = np.asarray(num_prompt_tokens, dtype=np.float64)
    times = np.asarray(seconds, dtype=np.float64)
    columns = np.stack([np.ones_like(tokens), tokens, tokens**2], axis=1) / times[:, None]  # [points, 3]
    units = np.abs(columns).max(axis=0)  # brings 1 and n^2 to one size
    best, best_error = np.zeros(3), float(len(times))
    for count in (1, 2, 3):
        for subset in itertools.combinations(range(3), count):
            chosen = list(subset)
            coefficients = np.zeros(3)
            coefficients[chosen] = np.linalg.lstsq(
                columns[:, chosen] / units[chosen], np.ones_like(times), rcond=None
            )[0]
            error = float(np.square(columns / units @ coefficients - 1.0).sum())
            if (coefficients >= 0).all() and error < best_error:
                best, best_error = coefficients, error
    constant, linear, quadratic = (best / units).tolist()
    return PrefillFit(constant, linear, quadratic)


def probe_lengths(shortest: int, longest: int, num_lengths: int = 4) -> list[int]:
    """Return up to `num_lengths` different lengths, evenly spaced on a log scale, both ends included."""
    return sorted({round(length) for length in np.geomspace(shortest, longest, num_lengths).tolist()})
