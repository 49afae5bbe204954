"""KV of computed prompts moves to the instance that decodes where that costs less than serving it."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import H200, H200_CAPACITY
from simulation import simulate, timed_request
from snapshots import decoding, snapshot_of, waiting

from loong.core.check_plan import check_plan
from loong.core.plan import IterationPlan
from loong.core.request import SLO, RequestView
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy

EIGHT = [H200_CAPACITY] * 8
SOURCES = tuple(range(7))
PROMPTS = waiting("long prompt", 200_000), waiting("another", 150_000)


def planned(*views: RequestView, name: str = "esp", pools: list[int] = EIGHT) -> IterationPlan:
    snapshot = snapshot_of(pools, views)
    plan = make_policy(name, PolicyConfig())(snapshot, H200)
    check_plan(snapshot, plan)
    return plan


def moved_ids(plan: IterationPlan) -> set[str]:
    assert {migration.destination_id for migration in plan.migrations} <= {7}
    return {migration.segment.owner_id for migration in plan.migrations}


def test_kv_of_a_long_answer_moves_whole_and_its_request_waits_for_it() -> None:
    plan = planned(decoding("r", 50_000, SOURCES, max_tokens=500), *PROMPTS)
    assert moved_ids(plan) == {"r"}
    assert sum(len(migration.segment.positions) for migration in plan.migrations) == 50_000
    assert not any("r" in batch.request_ids for batch in plan.batches)


def test_kv_of_a_short_answer_is_served() -> None:
    plan = planned(decoding("r", 50_000, SOURCES, max_tokens=4), *PROMPTS)
    assert not plan.migrations
    assert any("r" in batch.request_ids for batch in plan.batches)


def test_kv_stays_where_reading_it_on_one_instance_takes_too_long_for_the_tpot_target() -> None:
    long = decoding("r", 350_000, SOURCES, max_tokens=2000)
    for tpot, moved in ((0.05, {"r"}), (0.015, set[str]())):
        assert moved_ids(planned(replace(long, slo=SLO(10.0, tpot)), *PROMPTS)) == moved


def test_kv_stays_where_the_instance_that_decodes_has_too_little_room_until_the_end() -> None:
    view = decoding("r", 50_000, SOURCES, max_tokens=500)
    for room, moved in ((50_600, {"r"}), (50_400, set[str]())):
        assert moved_ids(planned(view, waiting("long prompt", 100_000), pools=[60_000] * 7 + [room])) == moved


def test_without_moves_all_kv_is_served() -> None:
    view = decoding("r", 50_000, SOURCES, max_tokens=500)
    assert not planned(view, *PROMPTS, name="esp-no-moves").migrations


@pytest.mark.parametrize("name", ["esp", "esp-no-moves"])
def test_all_tokens_come_and_no_request_is_preempted(name: str) -> None:
    requests = [timed_request(n, (60_000, 300, 20_000)[n % 3], 100 + n, n * 0.1) for n in range(15)]
    run = simulate(name, EIGHT, requests, cost_model=H200)
    assert [len(run.tokens[r.request_id]) for r in requests] == [100 + n for n in range(15)]
    assert run.stats.num_preemptions == 0
    assert (run.stats.num_migrated_tokens > 0) == (name == "esp")


@pytest.mark.parametrize("name", ["esp", "esp-no-spread", "esp-no-guests"])
@given(seed=st.integers(0, 2**32))
def test_moves_after_which_decodes_need_more_instances_keep_the_rules(name: str, seed: int) -> None:
    random = Random(seed)
    decodes = [
        replace(
            decoding(f"r{n}", random.randint(1_000, 400_000), SOURCES, max_tokens=random.randint(2, 900)),
            slo=SLO(10.0, random.choice((0.008, 0.01, 0.015))),
        )
        for n in range(random.randint(1, 8))
    ]
    prompts = [waiting(f"p{n}", random.randint(10, 300_000)) for n in range(random.randint(1, 4))]
    planned(*decodes, *prompts, name=name)
