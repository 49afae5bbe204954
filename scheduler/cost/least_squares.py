"""Linear least squares with nonnegative unknowns, and standard errors of the solution."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]

SMALLEST_SLOPE = 1e-10  # relative, below which the active set is done
TINY = 1e-12  # avoids division by 0


def standard_errors(rows: Array) -> Array:
    """Return standard errors of a solution whose errors have deviation 1; huge where it is not unique."""
    norm = np.linalg.norm(rows, axis=0)
    tiny = np.finfo(float).eps * rows.shape[1]
    gram = (rows / norm).T @ (rows / norm) + tiny * np.eye(rows.shape[1])
    errors: Array = np.sqrt(np.maximum(np.diag(np.linalg.inv(gram)), 0.0)) / norm
    return errors


def nonnegative_least_squares(rows: Array, target: Array) -> Array:
    """Return the x >= 0 that brings `rows @ x` nearest to `target` (Lawson and Hanson's active set)."""
    norm = np.linalg.norm(rows, axis=0)
    gram, aim = (rows / norm).T @ (rows / norm), (rows / norm).T @ target
    x, is_free = np.zeros(len(aim)), np.zeros(len(aim), dtype=bool)
    for _ in range(10 * len(aim)):
        slope = np.where(is_free, -np.inf, aim - gram @ x)
        if slope.max() <= SMALLEST_SLOPE * np.abs(aim).max():
            break
        is_free[slope.argmax()] = True
        goal = _solution(gram, aim, is_free)
        while (falling := is_free & (goal <= 0)).any():
            x += np.min(x[falling] / np.maximum(x[falling] - goal[falling], TINY)) * (goal - x)
            is_free &= (x > 0) & ~(falling & (x <= TINY))
            x[~is_free] = 0
            goal = _solution(gram, aim, is_free)
        x = goal
    x /= norm
    return x


def _solution(gram: Array, aim: Array, is_free: Mask) -> Array:
    """Return the solution in which those that are not free are 0."""
    x = np.zeros(len(aim))
    x[is_free] = np.linalg.lstsq(gram[np.ix_(is_free, is_free)], aim[is_free], rcond=None)[0]
    return x
