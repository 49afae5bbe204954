"""Random policies, clients, faults and workers; the workers here keep their own accounts of slots."""

from collections.abc import Callable
from random import Random

import pytest
from cluster_machine import LARGER, WINDOWS, ClusterMachine
from examples import examples
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot


@pytest.mark.parametrize("keeps_prefixes", [False, True])
def test_whatever_happens_the_accounting_balance_and_every_request_ends_once(
    plan_at_random: Callable[[Random, Snapshot], IterationPlan],
    keeps_prefixes: bool,
) -> None:
    run_state_machine_as_test(
        lambda: ClusterMachine(plan_at_random, keeps_prefixes=keeps_prefixes),  # type: ignore[arg-type]  # it takes any maker of machines
        settings=settings(examples(30, thorough=300), stateful_step_count=25),
    )


@pytest.mark.parametrize("keeps_prefixes", [False, True])
def test_layers_with_a_window_have_all_that_queries_see_within_their_memory(
    plan_at_random: Callable[[Random, Snapshot], IterationPlan], keeps_prefixes: bool
) -> None:
    run_state_machine_as_test(
        lambda: ClusterMachine(plan_at_random, LARGER, keeps_prefixes=keeps_prefixes, windows=WINDOWS),  # type: ignore[arg-type]  # it takes any maker of machines
        settings=settings(examples(30, thorough=300), stateful_step_count=25),
    )
