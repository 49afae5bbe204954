"""Each ablation differs from `esp` in its named part, and in nothing else."""

from dataclasses import replace

import pytest
from machines import H200, H200_CAPACITY
from simulation import Run, simulate, timed_request

from loong.core.request import SLO, Request, SamplingParams
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.policy import ABLATIONS
from loong.scheduler.policy import POLICIES

NAMES = sorted(ABLATIONS)
FOUR = [H200_CAPACITY] * 4


def num_chunks(run: Run, request: Request) -> int:
    """Return the batches that compute some of its prompt."""
    num_prompt = len(request.prompt_token_ids)
    batches = (batch for _, plan in run.plans for batch in plan.batches)
    blocks = (batch.blocks_of(request.request_id) for batch in batches)
    return sum(bool(part) and part[0].positions.start < num_prompt for part in blocks)


def mixed() -> list[Request]:
    """Return long and short prompts that overlap."""
    return [timed_request(n, (300, 6000, 60_000)[n % 3] + 37 * n, 20, n * 0.05) for n in range(18)]


def test_prefixes_are_copied_for_requests_that_wait_to_read_them() -> None:
    prefix = tuple(range(3000))
    arrivals = [0.0, *(1.0 + 0.002 * n for n in range(30))]
    params = SamplingParams(max_tokens=20)
    requests = [
        Request(f"r{n:03}", (*prefix, *range(10_000 * n + 5000, 10_000 * n + 5200)), params, arrival_time=t)
        for n, t in enumerate(arrivals)
    ]
    names = "esp", "esp-no-copies"
    runs = [simulate(name, FOUR, requests, cost_model=H200, keeps_prefixes=True) for name in names]
    copying, waiting = (sum(run.ttft(request) for request in requests) for run in runs)
    assert copying < waiting
    assert runs[0].stats.num_copied_tokens >= len(prefix)
    assert runs[1].stats.num_copied_tokens == 0


def test_every_ablation_is_a_policy() -> None:
    assert set(NAMES) <= set(POLICIES)


@pytest.mark.parametrize("name", NAMES)
def test_an_ablation_serves_all_and_evicts_nobody(name: str) -> None:
    run = simulate(name, FOUR, mixed(), cost_model=H200)
    assert all(len(tokens) == 20 for tokens in run.tokens.values())
    assert run.stats.num_preemptions == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_lone_request_is_served_as_by_esp(name: str) -> None:
    alone = [timed_request(0, 500, 40)]
    assert simulate(name, [9000], alone).plans == simulate("esp", [9000], alone).plans


@pytest.mark.parametrize("name", NAMES)
def test_tight_pools_evict_nobody_either(name: str) -> None:
    requests = [timed_request(n, 5 + 31 * n % 60, 3 + 17 * n % 50, n * 3e-3) for n in range(24)]
    assert simulate(name, [150] * 3, requests).stats.num_preemptions == 0


def first_tokens(run: Run) -> list[str]:
    """Return requests in the order of their first tokens."""
    return sorted(run.token_times, key=lambda request_id: run.token_times[request_id][0])


def test_first_come_is_first_served() -> None:
    requests = [replace(timed_request(n, 20_000, 4, n * 0.01), slo=SLO(3.0 - n, 1.0)) for n in range(3)]
    in_order = [request.request_id for request in requests]
    assert first_tokens(simulate("esp-fcfs", [H200_CAPACITY], requests, cost_model=H200)) == in_order
    by_deadline = first_tokens(simulate("esp", [H200_CAPACITY], requests, cost_model=H200))
    assert by_deadline == in_order[::-1]


def test_without_chunks_a_prompt_is_one_batch() -> None:
    requests = [timed_request(0, 100_000, 4), timed_request(1, 30_000, 4, 0.01)]
    chunked, whole = (simulate(name, FOUR, requests, cost_model=H200) for name in ("esp", "esp-no-chunks"))
    assert [num_chunks(whole, request) for request in requests] == [1, 1]
    assert max(num_chunks(chunked, request) for request in requests) > 1


def groups(run: Run) -> set[tuple[int, ...]]:
    return {batch.group.instance_ids for _, plan in run.plans for batch in plan.batches}


def test_without_instances_for_decodes_all_run_everything_together() -> None:
    tight = PolicyConfig(target_tpot=0.0115)
    runs = [simulate(name, FOUR, mixed(), cost_model=H200, config=tight) for name in ("esp", "esp-no-apart")]
    apart, together = map(groups, runs)
    assert {(0, 1, 2), (3,)} <= apart
    assert (0, 1, 2, 3) in together
    assert (0, 1, 2) not in together


def test_without_lone_instances_short_prompts_are_computed_in_groups_too() -> None:
    chats = [timed_request(n, 300 + 37 * n, 60, n // 2 * 0.1) for n in range(24)]  # none is ever alone
    runs = [simulate(name, FOUR, chats, cost_model=H200) for name in ("esp", "esp-no-lone")]
    alone, together = ({len(group) for group in groups(run)} for run in runs)
    assert alone == {1}
    assert max(together) > 1
