"""A late prompt takes pauses of decodes, which keep their pace."""

from dataclasses import replace

import pytest
from machines import H200, H200_CAPACITY
from simulation import simulate, timed_request
from snapshots import begun, decoding, snapshot_of, waiting

from loong.core.check_plan import check_plan
from loong.core.decision import DecisionKind
from loong.core.plan import IterationPlan
from loong.core.request import SLO, RequestView
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.reasons import WaitReason
from loong.scheduler.policy import make_policy

FOUR = [H200_CAPACITY] * 4
NOW = 100.0
LOOSE = SLO(1.0, 0.05)


def late(name: str, num_tokens: int = 150_000) -> RequestView:
    return waiting(name, num_tokens, arrival_time=0.0, slo=LOOSE)


LONG = [late(f"long {number}") for number in range(4)]
GUEST = late("guest", 30_000)


def decodes(seconds: float = 0.3) -> list[RequestView]:
    """Decodes with KV where they decode, whose 60 tokens have taken so long."""
    views = [decoding(f"d{n}", 2000, (3,), max_tokens=900, num_output=60) for n in range(4)]
    return [replace(view, slo=LOOSE, first_token_time=NOW - seconds, last_token_time=NOW) for view in views]


def planned(*views: RequestView, name: str = "esp", pools: list[int] = FOUR) -> IterationPlan:
    snapshot = snapshot_of(pools, views, now=NOW)
    plan = make_policy(name, PolicyConfig())(snapshot, H200)
    check_plan(snapshot, plan)
    waiting_ids = {r for d in plan.decisions if d.kind is DecisionKind.WAIT for r in d.request_ids}
    assert waiting_ids.isdisjoint(groups(plan))
    return plan


def groups(plan: IterationPlan) -> dict[str, tuple[int, ...]]:
    """The instances that compute each request."""
    return {r: batch.group.instance_ids for batch in plan.batches for r in batch.request_ids}


def test_a_late_prompt_is_computed_where_others_decode_while_the_other_instances_compute_longer_ones() -> (
    None
):
    found = groups(planned(*decodes(), *LONG, GUEST))
    assert found.pop("guest") == (3,)
    assert set(found.values()) == {(0, 1, 2)}


@pytest.mark.parametrize("name", ["esp-no-guests", "esp"])
def test_the_instances_for_prompts_come_first(name: str) -> None:
    assert groups(planned(*decodes(), late("only"), name=name))["only"] == (0, 1, 2)


def test_short_late_prompts_are_computed_once() -> None:
    later = waiting("due first", 40, arrival_time=10.0, slo=SLO(0.8, 0.05))
    plan = planned(*decodes(), late("long"), late("oldest", 40), later)
    assert {groups(plan)["due first"], groups(plan)["oldest"]} == {(3,)}


def test_decodes_that_are_behind_their_target_come_first() -> None:
    found = groups(planned(*decodes(seconds=3.0), *LONG, GUEST))
    assert {r for r, group in found.items() if group == (3,)} == {"d0", "d1", "d2", "d3"}


def test_it_goes_on_where_its_kv_is_until_the_other_instances_have_no_more_work_than_it() -> None:
    guest = replace(begun("guest", 30_000, 10_000, (3,)), slo=LOOSE)
    assert groups(planned(*decodes(), *LONG, guest))["guest"] == (3,)
    assert groups(planned(*decodes(), guest))["guest"] == (0, 1, 2)


def test_a_prompt_in_time_is_no_guest_wherever_its_kv_is() -> None:
    begun_there = replace(begun("r", 30_000, 10_000, (3,)), slo=SLO(60.0, 0.05), arrival_time=NOW)
    assert groups(planned(*decodes(), *LONG, begun_there)).get("r") != (3,)


def test_one_that_pauses_for_others_may_be_a_guest_and_then_does_not_wait() -> None:
    in_time = [waiting(f"p{n}", 100_000, arrival_time=NOW, slo=SLO(60.0, 0.05)) for n in range(3)]
    paused = replace(late("paused", 60_000), arrival_time=1.0)
    others = (*in_time, late("oldest"), paused)
    assert groups(planned(*decodes(), *others))["paused"] == (3,)
    plan = planned(*decodes(seconds=3.0), *others)
    (why,) = [d.chosen for d in plan.decisions if d.kind is DecisionKind.WAIT and "paused" in d.request_ids]
    assert why == WaitReason.PAUSED_LATE


def test_it_needs_room_until_its_end_beside_all_decodes() -> None:
    for room, is_guest in ((45_000, True), (40_000, False)):
        found = groups(planned(*decodes(), *LONG, GUEST, pools=[*FOUR[:3], room]))
        assert (found.get("guest") == (3,)) == is_guest


def test_no_other_prompt_takes_its_room() -> None:
    guest = replace(begun("guest", 30_000, 10_000, (3,)), slo=LOOSE)
    short = waiting("short", 400, arrival_time=NOW, slo=LOOSE)
    for room, is_there in ((45_000, True), (42_000, False)):
        found = groups(planned(*decodes(), *LONG, guest, short, pools=[*FOUR[:3], room]))
        assert found["guest"] == (3,)
        assert (found.get("short") == (3,)) == is_there


def test_none_is_taken_that_would_end_after_all_others() -> None:
    assert (3,) not in {groups(planned(*decodes(), late("a"), late("b"))).get(r) for r in "ab"}


@pytest.mark.parametrize("num_instances", [2, 4])
def test_a_full_cluster_computes_all_sooner_with_guests_and_every_token_comes(num_instances: int) -> None:
    requests = [timed_request(n, 20_000 + 9_000 * (n % 5), 200, 0.2 * n) for n in range(40)]
    runs = {
        name: simulate(name, FOUR[:num_instances], requests, cost_model=H200)
        for name in ("esp", "esp-no-guests")
    }
    for run in runs.values():
        assert [len(run.tokens[r.request_id]) for r in requests] == [200] * 40
        assert run.stats.num_preemptions == 0
    ends = {name: max(times[-1] for times in run.token_times.values()) for name, run in runs.items()}
    assert ends["esp"] < ends["esp-no-guests"]
