"""Expected lengths of outputs leave room for the longest lease, also while requests wait."""

from dataclasses import replace
from random import Random

import pytest
from policy_machine import PolicyMachine

from loong.core.output_lengths import LEAST_OBSERVED
from loong.scheduler.common.expected_lengths import expecting
from loong.scheduler.tuning import LONG_LEASE_FACTOR

MOST_TOKENS = 600


@pytest.mark.parametrize("seed", range(5))
def test_no_expected_length_cuts_a_lease_short(seed: int) -> None:
    machine, random, num_shorter = PolicyMachine("replicas"), Random(seed), 0
    for max_tokens in range(1, MOST_TOKENS, 20):
        for _ in range(LEAST_OBSERVED):
            machine.state.observe_length(max_tokens, random.randint(1, max_tokens))
    machine.start()
    for _ in range(40):
        machine.moment(random)
        snapshot = machine.state.snapshot(0.0)
        running = tuple(view.declaring(random.randint(10, MOST_TOKENS)) for view in snapshot.running)
        for lease_steps in (1, 16):
            found = expecting(replace(snapshot, running=running), lease_steps)
            for declared, expected in zip(running, found.running, strict=True):
                longest = min(declared.num_remaining_tokens, lease_steps * LONG_LEASE_FACTOR)
                assert longest <= expected.num_remaining_tokens <= declared.num_remaining_tokens
                assert expected.declaring(declared.max_tokens) == declared
                num_shorter += expected.num_remaining_tokens < declared.num_remaining_tokens
    machine.teardown()
    assert num_shorter
