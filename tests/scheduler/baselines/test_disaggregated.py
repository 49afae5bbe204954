"""Prefill on some instances, decode on others."""

from collections.abc import Iterator

import pytest
from simulation import Run, instances_with, simulate, timed_request

from loong.core.plan import BatchPlan
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import admissible_tokens


def batches_of(run: Run) -> Iterator[BatchPlan]:
    return (batch for _, plan in run.plans for batch in plan.batches)


def num_computed(batch: BatchPlan, request_id: str) -> int:
    return sum(len(block.positions) for block in batch.blocks_of(request_id))


@pytest.mark.parametrize(("num_decode", "num_prefill"), [(2, 2), (1, 3), (3, 1)])
def test_the_first_instances_compute_whole_prompts_and_the_last_decode(
    num_decode: int, num_prefill: int
) -> None:
    requests = [timed_request(n, 20 + 7 * n, 9, n * 0.002) for n in range(12)]
    config = PolicyConfig(max_num_batched_tokens=64)
    run = simulate(f"disaggregated-{num_decode}", [500] * 4, requests, config=config)
    prompt_of = {r.request_id: len(r.prompt_token_ids) for r in requests}
    for batch in batches_of(run):
        (instance_id,) = batch.group.instance_ids
        if instance_id < num_prefill:
            assert all(num_computed(batch, r) == prompt_of[r] for r in batch.request_ids)
        else:
            assert all(num_computed(batch, r) == 1 for r in batch.request_ids)
    assert {batch.group.instance_ids for batch in batches_of(run)} == {(0,), (1,), (2,), (3,)}
    assert run.stats.num_migrated_tokens == sum(prompt_of.values())


def test_kv_that_arrives_joins_the_decode_batch_after_its_present_step() -> None:
    first, second = timed_request(0, 20, 200), timed_request(1, 20, 20, 0.1)
    run = simulate("disaggregated-1", [500, 500], [first, second], config=PolicyConfig(lease_steps=64))
    arrived_at, decoded_at = run.token_times["r001"][:2]
    steps = [time for time in run.token_times["r000"] if arrived_at < time < decoded_at]
    assert len(steps) <= 2


def test_kv_waits_where_it_was_made_until_a_decode_instance_has_room() -> None:
    requests = [timed_request(0, 60, 30), timed_request(1, 60, 30), timed_request(2, 20, 1)]
    run = simulate("disaggregated-1", [200, 100], requests)
    assert run.token_times["r001"][0] < run.token_times["r000"][-1] < run.token_times["r001"][1]
    assert run.token_times["r002"][0] < run.token_times["r000"][-1]
    assert run.stats.num_preemptions == 0


def test_a_request_must_fit_an_instance_of_either_kind() -> None:
    instances = instances_with([100, 40, 30, 70])
    assert admissible_tokens("disaggregated-2", instances) == 70
    assert admissible_tokens("disaggregated-3", instances) == 70
