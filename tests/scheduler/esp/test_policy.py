"""`esp` decodes on few instances, which read KV where it was computed, or runs all on all."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from machines import CPU, H200, H200_CAPACITY
from plans import decode, prefill
from simulation import Run, instances_with, simulate, timed_request
from snapshots import begun, decoding, running, snapshot_of, waiting

from loong.core.check_plan import check_plan
from loong.core.decision import DecisionKind
from loong.core.instance import Service
from loong.core.plan import BatchPlan, IterationPlan, Transfer
from loong.core.request import SLO, Request, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.esp.draft import Variant
from loong.scheduler.esp.policy import plan_esp
from loong.scheduler.esp.reasons import JOINED, WaitReason
from loong.scheduler.policy import admissible_tokens, make_policy

FOUR = [H200_CAPACITY] * 4
TIGHT = PolicyConfig(target_tpot=0.0115)


def mixed(num_output: int = 60) -> list[Request]:
    """Return long and short prompts that overlap."""
    return [timed_request(n, (300, 6000, 60_000)[n % 3] + 37 * n, num_output, n * 0.05) for n in range(12)]


def planned(
    snapshot: Snapshot,
    cost_model: WorkCostModel = CPU,
    config: PolicyConfig | None = None,
    name: str = "esp",
) -> IterationPlan:
    plan = make_policy(name, config or PolicyConfig(target_tpot=0.009))(snapshot, cost_model)
    check_plan(snapshot, plan)
    return plan


def is_decode(batch: BatchPlan) -> bool:
    return all(len(block.positions) == 1 for block in batch.queries)


def batches_of(run: Run) -> Iterator[BatchPlan]:
    return (batch for _, plan in run.plans for batch in plan.batches)


def group_of_decodes(*views: RequestView, capacities: tuple[int, ...] = (900_000,) * 8) -> tuple[int, ...]:
    """Return the instances that decode, each requests of its own."""
    batches = planned(snapshot_of(capacities, views), cost_model=H200, name="esp-no-moves").batches
    assert all(is_decode(batch) and batch.group.dop == 1 for batch in batches)
    decoded = [request_id for batch in batches for request_id in batch.request_ids]
    assert sorted(decoded) == sorted(view.request_id for view in views)
    return instances_of(batches)


def instances_of(batches: Iterable[BatchPlan]) -> tuple[int, ...]:
    return tuple(sorted(i for batch in batches for i in batch.group.instance_ids))


def test_with_tight_targets_decodes_run_on_the_last_instance_and_prompts_on_the_others() -> None:
    run = simulate("esp-no-guests", FOUR, mixed(), cost_model=H200, config=TIGHT)
    assert {batch.group.instance_ids for batch in batches_of(run) if is_decode(batch)} == {(3,)}
    prompts = [batch for batch in batches_of(run) if not is_decode(batch)]
    long = {f"r{n:03}" for n in range(12) if n % 3}
    groups = [b.group.instance_ids for b in prompts if long.intersection(b.request_ids)]
    lone = [ids for ids in groups if ids == (0, 1, 2, 3)]  # one that comes when nothing else is there
    assert len(lone) <= 2 < len(groups)
    assert {*groups} - {*lone} == {(0, 1, 2)}
    assert run.stats.num_preemptions == 0 < run.stats.num_migrated_tokens


def test_with_loose_targets_few_instances_run_decodes_and_prompts_together() -> None:
    run = simulate("esp", FOUR[:2], mixed(), cost_model=H200)
    sizes = [{len(block.positions) > 1 for block in batch.queries} for batch in batches_of(run)]
    assert {True, False} in sizes
    assert run.stats.num_preemptions == 0


def test_prompts_are_computed_while_decodes_read_their_kv() -> None:
    run = simulate("esp-no-moves", FOUR, mixed(), cost_model=H200, config=TIGHT)
    serving = [
        batch
        for snapshot, _ in run.plans
        for batch in snapshot.batches
        if is_decode(batch.plan) and snapshot.instance[0].batch_id is not None
    ]
    held = {i for batch in serving for i in batch.holder_ids}
    assert held == {0, 1, 2}


def test_tight_targets_are_met_beside_prompts() -> None:
    config = PolicyConfig(target_tpot=0.012)
    run = simulate("esp", [H200_CAPACITY] * 8, mixed(200), cost_model=H200, config=config)
    tpots = [(times[-1] - times[0]) / (len(times) - 1) for times in run.token_times.values()]
    assert max(tpots) < 0.012


def test_decodes_take_the_fewest_instances_that_meet_the_tightest_target() -> None:
    def some(tpot: float) -> list[RequestView]:
        views = [decoding(f"d{n}", 200, (n % 4,), max_tokens=2_000) for n in range(192)]
        return [replace(view, slo=SLO(tpot=tpot)) for view in views]

    numbers = [len(group_of_decodes(*some(tpot))) for tpot in (14e-3, 8e-3, 6.5e-3)]
    assert numbers[0] == 1 < numbers[1] < numbers[2]
    quickest = len(group_of_decodes(*some(1e-6)))  # no number meets it
    assert quickest >= numbers[2]
    (impatient, *_), patient = some(1e-6), some(8e-3)
    mixed = [replace(impatient, request_id="impatient"), *patient]
    assert len(group_of_decodes(*mixed)) == numbers[1]


def test_decodes_take_as_many_instances_as_have_room_for_all_their_tokens() -> None:
    views = [decoding(f"d{n}", 100, (0,), max_tokens=150) for n in range(10)]
    assert group_of_decodes(*views, capacities=(2000,) * 6) == (5,)
    assert group_of_decodes(*views, capacities=(2000, *(1000,) * 5)) == (4, 5)


def test_none_waits_for_room_on_instances_for_decodes_while_all_instances_have_enough() -> None:
    views = [decoding(f"d{n}", 10, (0,), max_tokens=80) for n in range(4)]
    plan = planned(snapshot_of([200, 200], views))
    assert [batch.request_ids for batch in plan.batches] == [("d0", "d1", "d2", "d3")]
    assert not plan.decisions


def test_decodes_wait_for_the_end_of_a_pause_where_their_kv_is() -> None:
    """Before the other instance for decodes takes steps of its own."""
    views = [decoding(f"d{n}", 100, (4 + n % 2,), max_tokens=150) for n in range(10)]
    batch = running(7, prefill([waiting("quick", 30)], (5,)))
    snapshot = snapshot_of((1500,) * 6, [*views, waiting("quick", 30)], [batch])
    plan = planned(snapshot, H200)
    assert not plan.migrations
    (lease,) = (batch for batch in plan.batches if is_decode(batch))
    assert lease.group.instance_ids == (4,)
    assert set(lease.request_ids) == {view.request_id for view in views[::2]}


def test_those_that_find_no_room_on_idle_instances_wait_for_the_oldest() -> None:
    views = [decoding(f"d{n}", 100, (0,), max_tokens=150) for n in range(10)]
    prompt = begun("p", 200, 100, (4,))
    batch = running(7, prefill([prompt], (4,)))
    plan = planned(snapshot_of((2000, *(1000,) * 5), [*views, prompt], [batch]), H200, name="esp-no-moves")
    decodes = next(batch for batch in plan.batches if is_decode(batch))
    assert decodes.group.instance_ids == (5,)
    assert decodes.request_ids == tuple(f"d{n}" for n in range(6))
    assert [d.request_ids for d in plan.decisions if d.chosen == WaitReason.NO_SLOTS] == [
        ("d6", "d7", "d8", "d9")
    ]


def test_a_prompt_goes_on_though_an_instance_that_has_some_of_it_decodes_now() -> None:
    views = [begun("p", 9000, 3000, (0, 1, 2, 3)), decoding("d", 10, (3,), max_tokens=80)]
    plan = planned(snapshot_of([20_000] * 4, views), H200, TIGHT)
    decodes, prompt = plan.batches
    assert decodes.group.instance_ids == (3,)
    assert prompt.group.instance_ids == (0, 1, 2)
    assert {block.transfer for block in prompt.queries} == {Transfer.QUERY}


def test_decodes_spread_though_all_instances_have_kv_of_an_unfinished_prompt() -> None:
    views = [decoding(f"d{n}", 200, (n % 4,)) for n in range(256)]
    views = [replace(view, slo=SLO(tpot=9.6e-3)) for view in views]
    prompt = begun("p", 60_000, 9000, tuple(range(7)))
    plan = planned(snapshot_of((90_000,) * 8, [*views, prompt]), H200)
    leases = [batch for batch in plan.batches if is_decode(batch)]
    assert len(leases) > 1
    assert instances_of(leases) == tuple(range(8 - len(leases), 8))


def test_all_instances_together_compute_what_only_they_have_room_for() -> None:
    plan = planned(snapshot_of([900] * 4, [waiting("w", 3000)]), H200, TIGHT)
    assert {segment.instance_id for batch in plan.batches for segment in batch.writes} == {0, 1, 2, 3}


def test_to_go_on_together_leases_end_and_idle_instances_wait() -> None:
    old, new, late = decoding("old", 10, (1,)), decoding("new", 10, (0,)), waiting("late", 30_000)
    lease = replace(decode([old], (1,), {"old": 1}, num_steps=50), predicted_time=0.01)
    snapshot = snapshot_of([90_000] * 2, [old, new, late], [running(7, lease)], now=0.001)
    plan = plan_esp(snapshot, H200, PolicyConfig(), Variant(has_light_apart=False))
    assert [end.batch_id for end in plan.lease_ends] == [7]
    assert any(d.kind is DecisionKind.END_LEASE and d.chosen == JOINED for d in plan.decisions)
    assert [decision.request_ids for decision in plan.decisions if decision.chosen == WaitReason.BUSY] == [
        ("late",)
    ]
    assert not plan.batches


def test_while_others_compute_a_prompt_idle_instances_go_on_with_decodes() -> None:
    views = [decoding("d", 10, (1,)), begun("long", 30_000, 9_000, (0,)), waiting("late", 30_000)]
    step = prefill([views[1]], (0,), num_tokens=9_000)
    in_flight = snapshot_of([90_000] * 2, views, [running(7, step)], now=0.001)
    (lease,) = planned(in_flight, H200, PolicyConfig()).batches
    assert is_decode(lease)
    assert lease.group.instance_ids == (1,)
    (batch,) = planned(snapshot_of([90_000] * 2, views), H200, PolicyConfig()).batches
    assert set(batch.group.instance_ids) == {0, 1}
    assert not is_decode(batch)


def test_a_lease_ends_for_a_decode_that_comes_but_not_before_it_was_worth_its_start() -> None:
    old, new = decoding("old", 100, (0,), max_tokens=100), decoding("new", 100, (1,))
    lease = running(1, decode([old], (2,), {"old": 2}, num_steps=50), num_steps_taken=20)
    plan = planned(snapshot_of([900] * 3, [old, new], [lease], now=1.0))
    assert [(end.batch_id, end.step) for end in plan.lease_ends] == [(1, 21)]
    assert any(d.kind is DecisionKind.END_LEASE and d.chosen == JOINED for d in plan.decisions)
    assert not planned(snapshot_of([900] * 3, [old], [lease], now=1.0)).lease_ends


def test_the_number_of_decode_instances_is_explained_with_the_next_number() -> None:
    plan = planned(snapshot_of([900] * 4, [decoding("d", 100, (0,))]))
    (decision,) = plan.decisions
    assert decision.kind is DecisionKind.DOP
    assert decision.chosen == "decodes on 1 of 4 instances, which read KV where it is"
    assert [alternative.what for alternative in decision.alternatives] == [
        decision.chosen,
        "decodes on 2",
    ]


def test_an_instance_that_is_left_alone_does_both() -> None:
    views = [waiting("w", 50), decoding("d", 100, (0,))]
    (batch,) = planned(snapshot_of([900], views)).batches
    assert batch.request_ids == ("d", "w")


def test_where_instances_serve_one_lease_at_a_time_decodes_leave_prompts_all_the_same() -> None:
    run = simulate("esp", FOUR, mixed(), cost_model=H200, config=TIGHT, serves=Service.OWN_HOST)
    groups = {batch.group.instance_ids for batch in batches_of(run) if not is_decode(batch)}
    assert (0, 1, 2) in groups
    assert any(
        batch.holder_ids([snapshot.request[r].placement for r in batch.request_ids])
        for snapshot, plan in run.plans
        for batch in plan.batches
    )


def test_one_request_may_come_to_what_all_hold() -> None:
    assert admissible_tokens("esp", instances_with([100, 40, 30])) == 170
    assert admissible_tokens("esp", instances_with([100])) == 100


def test_where_no_decode_finds_a_slot_and_nothing_runs_the_last_to_come_is_preempted() -> None:
    views = [decoding("d0", 80, (0,), max_tokens=9), decoding("d1", 20, (0,), max_tokens=9)]
    views += [begun(f"p{n}", 60, 45, (1,), max_tokens=9) for n in range(2)]
    plan = planned(snapshot_of([100, 90], views))
    assert [preemption.request_id for preemption in plan.preemptions] == ["p1"]
    assert [d.request_ids for d in plan.decisions if d.kind is DecisionKind.PREEMPT] == [("p1",)]
    assert not plan.batches


def test_one_alone_is_never_preempted() -> None:
    assert not planned(snapshot_of([100], [decoding("full", 100, (0,), 99)])).preemptions


def test_instances_that_serve_nothing_run_long_prompts_and_decodes_together() -> None:
    run = simulate("esp", FOUR, mixed(), cost_model=H200, config=TIGHT, serves=Service.NONE)
    long = {"r002", "r005", "r008", "r011"}
    groups = {b.group.instance_ids for b in batches_of(run) if long.intersection(b.request_ids)}
    assert groups == {(0, 1, 2, 3)}


def on_two_hosts(snapshot: Snapshot) -> Snapshot:
    """Put the first half of the instances on one host, and the second on another."""
    half = len(snapshot.instances) // 2
    instances = tuple(replace(i, host_id=int(i.instance_id >= half)) for i in snapshot.instances)
    return replace(snapshot, instances=instances)


def test_each_host_decodes_where_its_kv_is() -> None:
    tight = SLO(ttft=1.0, tpot=8e-3)
    views = [replace(decoding(f"r{i}", 40_000, (4 * (i % 2),), 100), slo=tight) for i in range(16)]
    near = snapshot_of((400_000,) * 8, views)
    batches = planned(near, cost_model=H200).batches
    assert instances_of(batches) == tuple(range(8 - len(batches), 8))
    assert len(batches) >= 2
    batches = planned(on_two_hosts(near), cost_model=H200).batches
    assert {i // 4 for i in instances_of(batches)} == {0, 1}
    for batch in batches:
        (host,) = {i // 4 for i in batch.group.instance_ids}
        assert {int(request_id[1:]) % 2 for request_id in batch.request_ids} == {host}


def test_where_a_request_has_kv_on_two_hosts_both_decode_in_turn_each_where_its_kv_is() -> None:
    tight = SLO(ttft=1.0, tpot=8e-3)
    holders = [(4 * (i % 2),) if i else (0, 4) for i in range(16)]
    views = [replace(decoding(f"r{i}", 40_000, held, 100), slo=tight) for i, held in enumerate(holders)]
    batches = planned(on_two_hosts(snapshot_of((400_000,) * 8, views)), cost_model=H200).batches
    hosts = [i // 4 for i in instances_of(batches)]
    assert len(batches) >= 2
    assert abs(hosts.count(0) - hosts.count(1)) <= 1
    for block in (block for batch in batches for block in batch.queries):
        assert block.request_id == "r0" or block.master_id // 4 == int(block.request_id[1:]) % 2


def hosts_by_request(requests: list[Request], capacity: int) -> dict[str, set[int]]:
    """Return the hosts that compute each request, on two of two instances."""
    policy = make_policy("esp", TIGHT)
    run = simulate(lambda s, c: policy(on_two_hosts(s), c), [capacity] * 4, requests, cost_model=H200)
    hosts = defaultdict[str, set[int]](set)
    for batch in batches_of(run):
        for request_id in batch.request_ids:
            hosts[request_id].update(i // 2 for i in batch.group.instance_ids)
    return hosts


def test_each_request_stays_on_a_host_that_has_room_for_it_and_both_hosts_have_some() -> None:
    hosts = hosts_by_request(mixed(), H200_CAPACITY)
    assert all(len(of_one) == 1 for of_one in hosts.values())
    assert {host for of_one in hosts.values() for host in of_one} == {0, 1}


def test_a_prompt_that_no_host_has_room_for_is_computed_by_all() -> None:
    hosts = hosts_by_request([*mixed(), timed_request(12, 250_000, 8, 0.7)], 100_000)
    assert hosts["r012"] == {0, 1}


@pytest.mark.parametrize("serves", [Service.OWN_HOST, Service.NONE])
def test_beside_it_gpus_keep_the_kv_of_each_other_request_on_one_host(serves: Service) -> None:
    policy, requests = make_policy("esp", TIGHT), [*mixed(), timed_request(12, 250_000, 8, 0.7)]
    run = simulate(
        lambda s, c: policy(on_two_hosts(s), c), [100_000] * 4, requests, cost_model=H200, serves=serves
    )
    hosts = defaultdict[str, set[int]](set)
    for batch in batches_of(run):
        for segment in batch.writes:
            hosts[segment.owner_id].add(segment.instance_id // 2)
    assert hosts.pop("r012") == {0, 1}
    assert all(len(of_one) == 1 for of_one in hosts.values())


@pytest.mark.parametrize("serves", [Service.OWN_HOST, Service.NONE])
def test_beside_it_a_decode_whose_instance_is_full_goes_on_on_its_host(serves: Service) -> None:
    views = [decoding("long", 120_000, (0, 1, 2, 3), 100), decoding("near", 30_000, (0,), 100)]
    snapshot = on_two_hosts(snapshot_of((60_000, 90_000, 150_000, 150_000), views))
    instances = tuple(replace(i, serves=serves) for i in snapshot.instances)
    plan = planned(replace(snapshot, instances=instances), H200, TIGHT)
    assert snapshot.free[0] < 1
    written = {s.instance_id for batch in plan.batches for s in batch.writes if s.owner_id == "near"}
    assert written == {1}


def test_where_all_prompts_are_short_and_targets_loose_each_instance_runs_its_own() -> None:
    chats = [timed_request(n, 300 + 37 * n, 60, n // 2 * 0.1) for n in range(24)]  # none is ever alone
    run = simulate("esp", FOUR, chats, cost_model=H200)
    assert {batch.group.dop for batch in batches_of(run)} == {1}
    assert {i for batch in batches_of(run) for i in batch.group.instance_ids} == {0, 1, 2, 3}
    tight = PolicyConfig(target_tpot=0.0115)
    run = simulate("esp", FOUR, chats, cost_model=H200, config=tight)
    assert {batch.group.instance_ids for batch in batches_of(run) if is_decode(batch)} == {(3,)}


def test_no_lease_is_ended_that_ends_before_its_start_was_worth_it() -> None:
    old, late = decoding("old", 10, (1,)), waiting("late", 30_000)
    lease = replace(decode([old], (1,), {"old": 1}, num_steps=3), predicted_time=1e-9)
    snapshot = snapshot_of([90_000] * 2, [old, late], [running(7, lease)], now=0.001)
    assert not planned(snapshot, H200, PolicyConfig()).lease_ends


@pytest.mark.parametrize("seconds", [0.05, 0.2])
def test_a_step_of_prompts_takes_no_longer_than_an_operator_allows(seconds: float) -> None:
    views = [waiting(f"w{n}", 300_000) for n in range(2)]
    (batch,) = planned(snapshot_of([900_000] * 8, views), H200, replace(TIGHT, max_step_time=seconds)).batches
    assert batch.predicted_time is not None
    assert 0.9 * seconds < batch.predicted_time <= seconds


def test_where_only_all_instances_reach_a_late_prompt_they_compute_its_share() -> None:
    views = [begun("late", 300_000, 9000, (0, 1, 2, 3)), *(waiting(f"w{n}", 9000) for n in range(3))]
    views += [decoding(f"d{n}", 200, (n % 4,)) for n in range(8)]
    views = [view if n else replace(view, arrival_time=-1e4) for n, view in enumerate(views)]
    snapshot = snapshot_of([900_000] * 4, views)
    nobody_serves = tuple(replace(i, serves=Service.NONE) for i in snapshot.instances)
    plan = planned(replace(snapshot, instances=nobody_serves), H200, replace(TIGHT, deferred_share=0.5))
    assert any("late" in batch.request_ids for batch in plan.batches)


@pytest.mark.parametrize("num_tokens", [40, 200, 600, 2400, 9000, 33_000])
def test_a_lone_prompt_is_as_quick_as_on_any_fixed_groups(num_tokens: int) -> None:
    request = timed_request(0, num_tokens, 50)
    names = ("esp", "esp-fixed-4", "esp-fixed-2", "esp-fixed-1")
    first, *others = [simulate(name, FOUR, [request], cost_model=H200).token_times["r000"] for name in names]
    assert first[0] <= 1.05 * min(times[0] for times in others)
    assert first[-1] <= 1.05 * min(times[-1] for times in others)
