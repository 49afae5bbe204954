"""Observers show a run in the order in which things happened, under every policy."""

import pytest
from chaos import chaos
from examples import seeds
from policies import POLICY_NAMES
from recorded_runs import recorded_run
from true_stories import assert_true


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_stories_keep_the_order_of_what_happened(policy: str) -> None:
    run = recorded_run(policy, seed=0)
    assert_true(run.lines, run.history)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_so_they_do_where_plans_take_time(policy: str) -> None:
    run = recorded_run(policy, seed=1, plan_time=0.002)
    assert_true(run.lines, run.history)


@pytest.mark.parametrize("seed", seeds(1, thorough=5))
def test_so_they_do_whatever_is_planned(seed: int) -> None:
    run = recorded_run(chaos(seed), seed)
    assert_true(run.lines, run.history)
