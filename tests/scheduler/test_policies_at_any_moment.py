"""Clients that leave, losses and reports in any order: no plan of a policy is ever refused."""

from dataclasses import replace
from random import Random

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from policies import POLICY_NAMES
from policy_machine import CONFIG, PolicyMachine

from loong.core.instance import Service
from loong.core.output_lengths import LEAST_OBSERVED
from loong.scheduler.config import AdmissionRule

NUM_MOMENTS = 60


@pytest.mark.parametrize("name", POLICY_NAMES)
@examples(1, thorough=6)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_no_plan_is_refused_and_every_request_ends(name: str, seed: int) -> None:
    whatever_happens(PolicyMachine(name), Random(seed))


@pytest.mark.parametrize(
    ("name", "serves", "max_served_leases"),
    [("esp", Service.OWN_HOST, 1), ("infinite", Service.OWN_HOST, 1), ("esp", Service.NONE, 0)],
)
@examples(1, thorough=6)
@given(seed=st.integers(0, 2**32))
def test_so_it_is_where_instances_serve_few_leases_or_nothing(
    name: str, serves: Service, max_served_leases: int, seed: int
) -> None:
    machine = PolicyMachine(name, serves, max_served_leases=max_served_leases)
    whatever_happens(machine, Random(seed))


@pytest.mark.parametrize("name", ["esp", "esp-fixed-4", "esp-paper", "static-sp"])
@pytest.mark.parametrize("serves", Service)
@examples(1, thorough=4)
@given(seed=st.integers(0, 2**32))
def test_so_it_is_on_two_hosts(name: str, serves: Service, seed: int) -> None:
    whatever_happens(PolicyMachine(name, serves, num_hosts=2), Random(seed))


@pytest.mark.parametrize("name", POLICY_NAMES)
@examples(1, thorough=10)
@given(seed=st.integers(0, 2**32))
def test_so_it_is_where_outputs_grow_longer_than_all_before(name: str, seed: int) -> None:
    config = replace(CONFIG, admission=AdmissionRule.EXPECTED, lease_steps=1)  # the longest have 8
    machine = PolicyMachine(name, config=config)
    for max_tokens in range(1, 10):
        for _ in range(LEAST_OBSERVED):
            machine.state.observe_length(max_tokens, 1)
    whatever_happens(machine, Random(seed))


@pytest.mark.parametrize("name", POLICY_NAMES)
@examples(1, thorough=10)
@given(seed=st.integers(0, 2**32))
def test_so_it_is_where_ended_requests_leave_their_kv(name: str, seed: int) -> None:
    whatever_happens(PolicyMachine(name, keeps_prefixes=True), Random(seed))


@pytest.mark.parametrize("name", ["esp", "esp-fixed-2", "replicas", "chunked", "lamina", "static-sp"])
@examples(1, thorough=10)
@given(seed=st.integers(0, 2**32))
def test_so_it_is_with_memory_of_the_host(name: str, seed: int) -> None:
    whatever_happens(PolicyMachine(name, keeps_prefixes=True, host_tokens=60), Random(seed))


@examples(1, thorough=20)
@given(seed=st.integers(0, 2**32), window=st.integers(1, 5))
def test_so_it_is_where_layers_with_a_window_have_the_least_room(seed: int, window: int) -> None:
    config = replace(CONFIG, max_num_batched_tokens=4, chunk_tokens=4)  # for the least room to be short
    whatever_happens(PolicyMachine("esp", keeps_prefixes=True, config=config, window=window), Random(seed))


def whatever_happens(machine: PolicyMachine, random: Random) -> None:
    machine.start()
    for _ in range(NUM_MOMENTS):
        machine.moment(random)
    machine.teardown()
