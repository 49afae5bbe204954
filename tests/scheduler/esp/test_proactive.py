"""KV of a prompt goes to where it will decode while its last chunk is computed, where that costs least."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import H200, H200_CAPACITY
from simulation import simulate, timed_request
from snapshots import begun, decoding, snapshot_of, waiting

from loong.core.check_plan import check_plan
from loong.core.cost.work import step_work
from loong.core.plan import BatchPlan, IterationPlan
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy

EIGHT = [H200_CAPACITY] * 8
PROMPT_IDS = tuple(range(7))
CHAT = decoding("chat", 2_000, (7,), max_tokens=900)


def planned(snapshot: Snapshot, name: str = "esp") -> IterationPlan:
    plan = make_policy(name, PolicyConfig())(snapshot, H200)
    check_plan(snapshot, plan)
    return plan


def batch_of(plan: IterationPlan, request_id: str) -> BatchPlan:
    (batch,) = [batch for batch in plan.batches if request_id in batch.request_ids]
    return batch


def keepers(batch: BatchPlan, request_id: str) -> set[int]:
    return {segment.instance_id for segment in batch.writes_of(request_id)}


def test_the_last_chunk_pushes_its_kv_to_where_it_will_decode_and_earlier_kv_is_copied_there() -> None:
    last = begun("p", 75_000, 60_000, PROMPT_IDS, max_tokens=600)
    snapshot = snapshot_of(EIGHT, [last, waiting("next", 150_000), CHAT])
    plan, later = planned(snapshot), planned(snapshot, "esp-no-proactive")
    assert batch_of(plan, "p").num_written_tokens["p"] == 15_000
    assert keepers(batch_of(plan, "p"), "p") == {7}
    assert sum(len(m.segment.positions) for m in plan.migrations if m.destination_id == 7) == 60_000
    assert keepers(batch_of(later, "p"), "p") == {*PROMPT_IDS}
    assert not later.migrations


def test_a_chunk_that_is_not_the_last_one_keeps_its_kv_where_it_is_computed() -> None:
    snapshot = snapshot_of(EIGHT, [begun("p", 500_000, 60_000, PROMPT_IDS, max_tokens=600), CHAT])
    assert keepers(batch_of(planned(snapshot), "p"), "p") == {*PROMPT_IDS}


@pytest.mark.parametrize(("max_tokens", "expected"), [(600, 1), (1, 8)])
def test_a_group_scales_down_to_one_instance_if_the_answer_is_worth_it(
    max_tokens: int, expected: int
) -> None:
    batch = batch_of(planned(snapshot_of(EIGHT, [waiting("p", 20_000, max_tokens=max_tokens)])), "p")
    assert batch.group.dop == 8
    assert len(keepers(batch, "p")) == expected


def test_a_request_alone_has_all_instances_and_then_one_which_has_its_kv() -> None:
    requests = [timed_request(n, 20_000, 100, n * 10.0) for n in range(3)]
    runs = [simulate(name, EIGHT, requests, cost_model=H200) for name in ("esp", "esp-no-proactive")]
    proactive, reactive = runs
    assert proactive.stats.num_scale_downs == 3
    assert proactive.stats.num_retained_tokens == 3 * 17_500
    assert proactive.stats.num_served_tokens == proactive.stats.num_migrated_tokens == 0
    assert reactive.stats.num_retained_tokens == 0
    ends = [max(run.token_times["r000"]) for run in runs]
    assert ends[0] < ends[1]


def some_views(random: Random) -> list[RequestView]:
    prompts = [
        begun(
            f"p{n}",
            random.randint(200_001, 260_000),
            random.randint(1, 200_000),
            PROMPT_IDS,
            random.randint(1, 900),
        )
        for n in range(random.randint(0, 3))
    ]
    new = [
        waiting(f"w{n}", random.randint(10, 60_000), max_tokens=random.randint(1, 900))
        for n in range(random.randint(1, 6))
    ]
    return [*prompts, *new, *([CHAT] if random.random() < 0.7 else [])]


@given(seed=st.integers(0, 2**32))
def test_no_chunk_is_slowed_by_more_than_its_moves_would_take(seed: int) -> None:
    snapshot = snapshot_of(EIGHT, some_views(Random(seed)))
    placements = {request_id: view.placement for request_id, view in snapshot.request.items()}
    seconds = []
    for name in ("esp", "esp-no-proactive"):
        plan = planned(snapshot, name)
        steps = [batch for batch in plan.batches if batch.num_steps == 1]
        seconds.append([H200.step_time(step_work(batch, placements)) for batch in steps])
        times = [batch.predicted_time for batch in steps]
        assert times == pytest.approx(seconds[-1])
    most = sum(H200.migration_time(view.num_uncomputed_tokens, 0, 7) for view in snapshot.request.values())
    assert sum(seconds[0]) <= sum(seconds[1]) + most


def test_kv_of_a_prompt_leaves_an_instance_that_decodes_while_its_next_chunk_is_computed() -> None:
    prompt = begun("p", 500_000, 80_000, (*PROMPT_IDS, 7), max_tokens=600)
    plan = planned(snapshot_of(EIGHT, [prompt, CHAT]))
    assert batch_of(plan, "p").group.instance_ids == PROMPT_IDS
    assert keepers(batch_of(plan, "p"), "p") == {*PROMPT_IDS}
    assert {move.segment.instance_id for move in plan.migrations} == {7}
    assert {move.destination_id for move in plan.migrations} <= {*PROMPT_IDS}
    assert sum(len(move.segment.positions) for move in plan.migrations) == 10_000
    assert not planned(snapshot_of(EIGHT, [prompt, CHAT]), "esp-no-proactive").migrations


@pytest.mark.parametrize(("max_tokens", "num_homes"), [(300, 2), (2_000, 1)])
def test_decodes_have_as_many_instances_as_leave_time_for_prompts_that_take_their_places(
    max_tokens: int, num_homes: int
) -> None:
    """The same KV is read; where outputs are short, requests end and come more often."""
    chats = [decoding(f"c{n:03}", 400, (7,), max_tokens=max_tokens) for n in range(200)]
    config = PolicyConfig(target_tpot=0.015)
    snapshot = snapshot_of(EIGHT, [*chats, waiting("p", 300_000)])
    plan = make_policy("esp", config)(snapshot, H200)
    check_plan(snapshot, plan)
    assert batch_of(plan, "p").group.dop == 8 - num_homes
