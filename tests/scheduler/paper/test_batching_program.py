from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import inf
from random import Random

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from numba.core.dispatcher import Dispatcher
from small_programs import Program, cost_of, least_cost_by_equation, least_cost_of_all, random_program

import loong.scheduler.paper.batching_program as batching
from loong.core.cost.cost_model import PrefillTerms
from loong.scheduler.paper.batching_program import Demand, Offer, SolvedBatch, solve, warm_up


def prompt(num_tokens: int, weight: float = 1.0) -> Demand:
    return Demand(num_tokens, num_tokens, num_tokens**2, weight)


def per_token(max_dop: int, member: float = 0.0) -> list[PrefillTerms]:
    """Return a token a second and instance, and `member` seconds an instance."""
    return [PrefillTerms(member * dop, 0.0, 1 / dop, 0.0, 0.0) for dop in range(1, max_dop + 1)]


def check_solution(program: Program, least: float) -> None:
    solution = solve(*program)
    if solution is None:
        assert least == inf
        return
    assert solution.cost == pytest.approx(least, rel=1e-9, abs=1e-12)
    assert sum(cost_of(b, program) for b in solution.batches) == pytest.approx(solution.cost, abs=1e-12)
    boundaries = [0, *(batch.demands.stop for batch in solution.batches)]
    assert [(b.demands.start, b.demands.stop) for b in solution.batches] == list(pairwise(boundaries))
    assert boundaries[-1] == len(program.demands)
    assert all(a.offers.stop <= b.offers.start for a, b in pairwise(solution.batches))


@given(st.randoms(use_true_random=False))
@examples(40, thorough=800)
def test_no_way_to_cut_and_to_place_costs_less(random: Random) -> None:
    program = random_program(random, max_demands=7, max_offers=4)
    check_solution(program, least_cost_of_all(program))


@given(st.randoms(use_true_random=False))
@examples(5, thorough=80)
def test_the_quick_search_finds_what_the_whole_equation_does(random: Random) -> None:
    program = random_program(random, max_demands=40, max_offers=5)
    check_solution(program, least_cost_by_equation(program))


@contextmanager
def uncompiled() -> Iterator[None]:
    """Python itself runs what is compiled otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        for name, function in tuple(vars(batching).items()):
            if isinstance(function, Dispatcher):
                patch.setattr(batching, name, function.py_func)
        yield


@given(st.randoms(use_true_random=False))
@examples(6, thorough=120)
def test_machine_code_finds_what_its_source_does(random: Random) -> None:
    asked = random_program(random, max_demands=9, max_offers=4)
    compiled = solve(*asked)
    with uncompiled():
        assert solve(*asked) == compiled


def test_equal_prompts_are_cut_wherever_it_pays() -> None:
    solution = solve([prompt(100)] * 10, [Offer(1, 1000)] * 10, per_token(10, member=1.0))
    assert solution is not None
    assert solution.batches == tuple(SolvedBatch(slice(i, i + 1), slice(i, i + 1)) for i in range(10))
    assert solution.cost == 10 * 101


def test_a_light_prompt_goes_with_a_heavy_one_that_gains_from_all_units() -> None:
    solution = solve([prompt(100), prompt(10, weight=0.0)], [Offer(1, 1000)] * 4, per_token(4, member=1.0))
    assert solution is not None
    assert solution.batches == (SolvedBatch(slice(0, 2), slice(0, 4)),)
    assert solution.cost == pytest.approx(110 / 4 + 4)


def test_a_prompt_too_large_for_one_unit_takes_more_and_the_rest_go_beside_it() -> None:
    demands = [prompt(1500), prompt(10), prompt(10)]
    solution = solve(demands, [Offer(1, 1000)] * 3, per_token(3, member=1.0))
    assert solution is not None
    assert solution.batches == (SolvedBatch(slice(0, 1), slice(0, 2)), SolvedBatch(slice(1, 3), slice(2, 3)))
    assert solution.cost == pytest.approx(752 + 2 * 21)


@pytest.mark.parametrize("dear", range(3))
def test_a_unit_that_is_dear_is_left_out_wherever_it_stands(dear: int) -> None:
    offers = [Offer(1, 1000)] * 3
    offers[dear] = Offer(1, 1000, delayed_weight=1e4)
    solution = solve([prompt(100), prompt(90, weight=2.0)], offers, per_token(3))
    assert solution is not None
    used = [index for index in range(3) if index != dear]
    assert solution.batches == tuple(
        SolvedBatch(slice(i, i + 1), slice(k, k + 1)) for i, k in enumerate(used)
    )
    assert solution.cost == 100 + 2 * 90


@pytest.mark.parametrize(
    ("offers", "max_dop"),
    [([], 4), ([Offer(1, 99)], 4), ([Offer(1, 60), Offer(1, 60)], 1), ([Offer(0, 500)], 4)],
    ids=["no instance set", "no room", "no DoP with room", "no instance"],
)
def test_what_cannot_be_met_has_no_solution(offers: list[Offer], max_dop: int) -> None:
    assert solve([prompt(100)], offers, per_token(max_dop)) is None


def test_no_demands_cost_nothing() -> None:
    for offers in ([], [Offer(1, 100, delayed_weight=2.0)]):
        solution = solve([], offers, per_token(1))
        assert solution is not None
        assert (solution.batches, solution.cost) == ((), 0.0)


def test_of_equal_costs_the_first_unit_takes_all_that_it_has_room_for() -> None:
    weightless = [prompt(n, weight=0.0) for n in (50, 40, 30, 20)]
    for num_free, batches in (
        (140, (SolvedBatch(slice(0, 4), slice(0, 1)),)),
        (90, (SolvedBatch(slice(0, 1), slice(0, 1)), SolvedBatch(slice(1, 4), slice(1, 2)))),
    ):
        solution = solve(weightless, [Offer(1, num_free)] * 4, per_token(4))
        assert solution is not None
        assert (solution.batches, solution.cost) == (batches, 0.0)


def test_every_prompt_of_a_batch_costs_what_one_costs() -> None:
    solution = solve([prompt(1)] * 2, [Offer(1, 10)], [PrefillTerms(1.0, 0.0, 0.0, 0.0, 0.0, per_prompt=5.0)])
    assert solution is not None
    assert solution.cost == (1 + 2 * 5) * 2


@pytest.mark.parametrize("wrong", [-1.0, inf, float("nan")])
def test_numbers_that_would_break_the_search_are_refused_by_name(wrong: float) -> None:
    good = Program([prompt(10)] * 2, [Offer(1, 10)], per_token(1))
    with pytest.raises(ValueError, match=r"demands\[1\].weight .* is (-1.0|inf|nan)"):
        solve([prompt(10), prompt(10, weight=wrong)], good.offers, good.terms)
    with pytest.raises(ValueError, match=r"offers\[0\].delayed_weight"):
        solve(good.demands, [Offer(1, 10, delayed_weight=wrong)], good.terms)
    with pytest.raises(ValueError, match=r"terms\[0\].floor"):
        solve(good.demands, good.offers, [PrefillTerms(0.0, wrong, 0.0, 0.0, 0.0)])


def test_warming_up_needs_nothing_and_changes_nothing() -> None:
    program = Program([prompt(100)], [Offer(1, 100)], per_token(1))
    before = solve(*program)
    warm_up()
    assert solve(*program) == before
