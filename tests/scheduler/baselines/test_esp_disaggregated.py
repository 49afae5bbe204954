"""`esp-disaggregated`: prompts on the first instances, decodes on the last, KV moves between."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from machines import CPU
from simulation import Run, instances_with, simulate, timed_request
from snapshots import begun, decoding, snapshot_of

from loong.core.check_plan import check_plan
from loong.core.plan import BatchPlan, IterationPlan, Preemption, PreemptionReason
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import admissible_tokens, make_policy

NAME = "esp-disaggregated-1"


def batches_of(run: Run) -> Iterator[BatchPlan]:
    return (batch for _, plan in run.plans for batch in plan.batches)


def planned(views: list[RequestView], capacities: list[int], name: str = NAME) -> IterationPlan:
    snapshot: Snapshot = snapshot_of(capacities, views)
    plan = make_policy(name, PolicyConfig())(snapshot, CPU)
    check_plan(snapshot, plan)
    return plan


def moves(plan: IterationPlan) -> dict[str, set[tuple[int, int]]]:
    """From where to where KV of each request goes."""
    found: dict[str, set[tuple[int, int]]] = {}
    for move in plan.migrations:
        ends = (move.segment.instance_id, move.destination_id)
        found.setdefault(move.segment.owner_id, set()).add(ends)
    return found


@pytest.mark.parametrize(("num_decode", "num_prefill"), [(2, 2), (1, 3), (3, 1)])
def test_the_first_instances_compute_prompts_as_one_group_and_the_last_decode(
    num_decode: int, num_prefill: int
) -> None:
    requests = [timed_request(n, 20 + 37 * n, 9, n * 0.002) for n in range(12)]
    run = simulate(f"esp-disaggregated-{num_decode}", [900] * 4, requests)
    sources = tuple(range(num_prefill))
    for batch in batches_of(run):
        for request_id in batch.request_ids:
            num_prompt = len(requests[int(request_id[1:])].prompt_token_ids)
            is_prompt = batch.blocks_of(request_id)[0].positions.start < num_prompt
            assert (batch.group.instance_ids == sources) == is_prompt
            assert is_prompt or batch.group.dop == 1
    assert run.stats.num_migrated_tokens == sum(len(r.prompt_token_ids) for r in requests)
    assert run.stats.num_preemptions == 0


def test_prompts_are_read_where_they_were_computed_though_their_kv_has_moved() -> None:
    requests = [timed_request(n, num_prompt, 9, 5.0 * n) for n, num_prompt in enumerate((90, 90, 120))]
    run = simulate(NAME, [400, 400], requests, keeps_prefixes=True)
    borrowed = {b.request_id: b for _, plan in run.plans for b in plan.borrowings}
    assert {r: sum(len(s.positions) for s in b.segments) for r, b in borrowed.items()} == {
        "r001": 89,
        "r002": 90,
    }
    assert {s.instance_id for b in borrowed.values() for s in b.segments} == {0}
    assert run.stats.num_migrated_tokens == 90 + 90 + 120
    assert run.stats.num_computed_tokens == 90 + 1 + 30 + 3 * 8


def test_kv_goes_to_the_roomiest_instance_in_order_of_arrival() -> None:
    views = [replace(decoding(f"r{n}", 90, (0, 1)), arrival_time=float(-n)) for n in range(3)]
    assert moves(planned(views, [300, 300, 150, 250], "esp-disaggregated-2")) == {
        "r2": {(0, 3), (1, 3)},
        "r1": {(0, 2), (1, 2)},
        "r0": {(0, 3), (1, 3)},
    }


def test_a_request_that_finds_no_room_holds_up_those_that_came_later() -> None:
    first, second = decoding("first", 200, (0,)), decoding("second", 20, (0,))
    there = decoding("there", 150, (1,))
    plan = planned([first, replace(second, arrival_time=1.0), there], [400, 300])
    assert not plan.migrations
    assert [batch.request_ids for batch in plan.batches] == [("there",)]


def test_a_request_too_long_for_one_decode_instance_is_spread() -> None:
    plan = planned([decoding("long", 150, (0,))], [400, 100, 120], "esp-disaggregated-2")
    assert moves(plan) == {"long": {(0, 1), (0, 2)}}
    run = simulate("esp-disaggregated-2", [400, 100, 120], [timed_request(0, 150, 30)])
    assert len(run.tokens["r000"]) == 30


def test_kv_that_arrives_joins_the_decode_batch_after_its_present_step() -> None:
    first, second = timed_request(0, 20, 200), timed_request(1, 20, 20, 0.1)
    run = simulate(NAME, [500, 500], [first, second], config=PolicyConfig(lease_steps=64))
    arrived_at, decoded_at = run.token_times["r001"][:2]
    steps = [time for time in run.token_times["r000"] if arrived_at < time < decoded_at]
    assert len(steps) <= 2


def test_a_move_that_failed_in_part_is_completed() -> None:
    assert moves(planned([decoding("r", 90, (0, 1))], [300, 300])) == {"r": {(0, 1)}}


def test_a_prompt_on_both_parts_is_computed_anew() -> None:
    plan = planned([begun("r", 90, 40, (0, 1))], [300, 300])
    assert plan.preemptions == (Preemption("r", PreemptionReason.CHANGED_ROLES),)


def test_one_instance_that_is_left_does_both() -> None:
    plan = planned([decoding("d", 20, (0,)), begun("p", 90, 40, (0,))], [300])
    assert {r for batch in plan.batches for r in batch.request_ids} == {"d", "p"}


def test_a_request_must_fit_the_instances_of_either_part() -> None:
    instances = instances_with([100, 40, 30, 70])
    assert admissible_tokens("esp-disaggregated-2", instances) == 100
    assert admissible_tokens("esp-disaggregated-1", instances) == 70
