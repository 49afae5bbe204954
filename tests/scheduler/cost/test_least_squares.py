"""The active set against its definition."""

import numpy as np
import pytest

from loong.scheduler.cost.least_squares import nonnegative_least_squares, standard_errors


@pytest.mark.parametrize("seed", range(20))
def test_no_small_step_from_the_solution_does_better(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, target = random.normal(size=(30, 6)), random.normal(size=30)
    found = nonnegative_least_squares(rows, target)
    assert (found >= 0).all()
    best = np.sum((rows @ found - target) ** 2)
    for step in 1e-4 * np.vstack((np.eye(6), -np.eye(6))):
        moved = np.maximum(found + step, 0)
        assert np.sum((rows @ moved - target) ** 2) >= best - 1e-9


def test_columns_of_any_scale_are_solved_alike() -> None:
    random = np.random.default_rng(1)
    scale = 10.0 ** np.arange(-9, 9, 3)
    rows, truth = random.random(size=(40, 6)), random.random(6)
    found = nonnegative_least_squares(rows * scale, rows @ truth)
    np.testing.assert_allclose(found * scale, truth, rtol=1e-6)


def test_standard_errors_are_those_of_many_repetitions() -> None:
    random = np.random.default_rng(2)
    rows, truth = random.random(size=(50, 3)), np.array([5.0, 6.0, 7.0])
    found = [nonnegative_least_squares(rows, rows @ truth + random.normal(size=50)) for _ in range(400)]
    np.testing.assert_allclose(np.std(found, axis=0), standard_errors(rows), rtol=0.2)


def test_what_is_not_unique_has_a_huge_error() -> None:
    column = np.random.default_rng(3).random((20, 1))
    errors = standard_errors(np.hstack((column, 2 * column, 1 + column**2)))
    assert min(errors[:2]) > 1e5
    assert errors[2] < 10


def test_without_unknowns_there_is_nothing_to_solve() -> None:
    assert nonnegative_least_squares(np.empty((5, 0)), np.ones(5)).shape == (0,)
    assert standard_errors(np.empty((5, 0))).shape == (0,)
