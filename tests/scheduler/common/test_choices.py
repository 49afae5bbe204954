"""Every policy serves requests with several choices, and counts what they share once."""

from dataclasses import replace
from random import Random

import pytest
from chaos import chaos
from examples import seeds
from policies import POLICY_NAMES, num_instances_of
from simulation import Run, instances_with, simulate, timed_request
from snapshots import decoding, waiting

from loong.core.placement import BorrowedKV, striped
from loong.core.request import Request, RequestView
from loong.scheduler.common.borrowed_kv import borrowed_by_last
from loong.scheduler.common.future_kv import FutureKV
from loong.scheduler.common.request_lengths import Lengths
from loong.scheduler.policy import admissible_tokens


def requests_with_choices(seed: int, largest: int) -> list[Request]:
    """Return requests, some of which need `largest` tokens of KV in all their choices."""
    random = Random(seed)
    requests = []
    for number in range(8):
        num_choices, num_output = random.choice((1, 2, 5, 8)), random.randint(1, 20)
        num_prompt = random.randint(1, largest - num_choices * num_output)
        request = timed_request(number, num_prompt, num_output, 0.02 * number)
        requests.append(replace(request, num_choices=num_choices))
    return requests


def assert_all_served(run: Run, requests: list[Request]) -> None:
    for choice in (choice for request in requests for choice in request.choices()):
        assert len(run.tokens[choice.request_id]) == choice.sampling_params.max_tokens


@pytest.mark.parametrize("seed", seeds(1, thorough=5))
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_choice_is_served_where_room_is_scarce(policy: str, seed: int) -> None:
    num_instances = num_instances_of(policy, 4)
    capacities = [4000 // num_instances] * num_instances
    largest = admissible_tokens(policy, instances_with(capacities))
    requests = requests_with_choices(seed, largest)
    assert_all_served(simulate(policy, capacities, requests), requests)


@pytest.mark.parametrize("seed", seeds(1, thorough=5))
def test_every_choice_is_served_whatever_is_planned(seed: int) -> None:
    requests = requests_with_choices(seed, 200)[:4]
    assert_all_served(simulate(chaos(seed), [1000] * 4, requests), requests)


def sharing(request_id: str, num_prompt: int, num_output: int, max_tokens: int) -> RequestView:
    """Return one of a family whose prompt is on instance 0."""
    view = decoding(request_id, num_prompt, (0,), max_tokens, num_output)
    return replace(view, borrowed=(BorrowedKV("kv", striped(request_id, range(num_prompt), (0,))),))


def future_of(views: list[RequestView]) -> FutureKV:
    return FutureKV.of(Lengths.of(views))


def test_what_a_family_shares_counts_once_until_the_last_of_it_ends() -> None:
    family = [sharing("a", 100, 5, 10), sharing("a-1", 100, 2, 10), sharing("a-2", 100, 8, 10)]
    assert borrowed_by_last(family, lambda view: view.num_remaining_tokens) == {"a-1": 100}
    # after 2 steps: 9 and 6 and 3 of their own, and the prompt; after 5: 9 and 6; after 8: 9.
    assert future_of(family).peak == 100 + max(9 + 6 + 3, 9 + 6, 9)


def test_a_prompt_with_siblings_is_to_come_to_what_all_of_them_will() -> None:
    lone, prompt = waiting("b", 50, max_tokens=10), replace(waiting("a", 100, max_tokens=10), num_siblings=3)
    assert prompt.num_final_tokens == 100 + 4 * 9
    assert future_of([prompt]).peak == 99 + 4 * 10
    assert future_of([lone]).adding(prompt).peak == future_of([lone, prompt]).peak
