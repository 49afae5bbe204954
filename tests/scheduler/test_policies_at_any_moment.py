"""Clients that leave, losses and reports in any order: no plan of a policy is ever refused."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import POLICY_NAMES
from policy_machine import PolicyMachine

from loong.core.instance import Service

NUM_MOMENTS = 60


@pytest.mark.parametrize("name", POLICY_NAMES)
@settings(max_examples=3)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_no_plan_is_refused_and_every_request_ends(name: str, seed: int) -> None:
    whatever_happens(PolicyMachine(name), Random(seed))


@pytest.mark.parametrize("serves", [Service.ONE_LEASE, Service.NONE])
@settings(max_examples=3)
@given(seed=st.integers(0, 2**32))
def test_so_it_is_where_instances_serve_decode_leases_alone_or_nothing(serves: Service, seed: int) -> None:
    whatever_happens(PolicyMachine("esp", serves), Random(seed))


@pytest.mark.parametrize("name", ["esp", "esp-fixed-4", "esp-paper", "static-sp"])
@pytest.mark.parametrize("serves", Service)
@settings(max_examples=2)
@given(seed=st.integers(0, 2**32))
def test_so_it_is_on_two_hosts(name: str, serves: Service, seed: int) -> None:
    whatever_happens(PolicyMachine(name, serves, num_hosts=2), Random(seed))


def whatever_happens(machine: PolicyMachine, random: Random) -> None:
    machine.start()
    for _ in range(NUM_MOMENTS):
        machine.moment(random)
    machine.teardown()
