"""Random policies, clients, faults and workers; the workers here keep their own accounts of slots."""

from collections.abc import Callable
from random import Random

import pytest
from cluster_machine import ClusterMachine
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot


@pytest.mark.parametrize("keeps_prefixes", [False, True])
def test_whatever_happens_the_accounting_balance_and_every_request_ends_once(
    plan_at_random: Callable[[Random, Snapshot], IterationPlan], keeps_prefixes: bool
) -> None:
    run_state_machine_as_test(
        lambda: ClusterMachine(plan_at_random, keeps_prefixes=keeps_prefixes),  # type: ignore[arg-type]  # it takes any maker of machines
        settings=settings(max_examples=150, stateful_step_count=25),
    )
