"""The elastic policy as a whole, in virtual time; every plan is checked as it is committed."""

from dataclasses import replace
from itertools import pairwise
from random import Random
from statistics import quantiles

import pytest
from machines import CPU, H200, H200_CAPACITY
from plans import decode
from simulation import Run, simulate, timed_request
from snapshots import decoding, running, snapshot_of, waiting

from loong.core.cost.cost_model import prefill_time
from loong.core.events import InstanceLost
from loong.core.plan import BatchPlan, IterationPlan
from loong.core.request import SLO, Request
from loong.core.snapshot import Snapshot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.policy import plan_esp


def mixed_workload(num_requests: int, request_rate: float, seed: int) -> list[Request]:
    """Return a third short chats, a third documents, a third long documents; Poisson arrivals."""
    random, now, requests = Random(seed), 0.0, []
    for number in range(num_requests):
        now += random.expovariate(request_rate)
        shortest, longest = random.choice([(4, 36), (42, 3280), (236, 7770)])
        num_prompt = int(shortest * (longest / shortest) ** random.random())
        requests.append(timed_request(number, num_prompt, random.randint(2, 16), now))
    return requests


def in_order(*requests: Request) -> list[Request]:
    return sorted(requests, key=lambda request: request.arrival_time)


def batches_of(run: Run) -> list[BatchPlan]:
    return [batch for _, plan in run.plans for batch in plan.batches]


def num_computed(batch: BatchPlan, request_id: str) -> int:
    return sum(len(block.positions) for block in batch.blocks_of(request_id))


def p99(values: list[float]) -> float:
    return quantiles(values, n=100)[98]


def test_a_mixed_workload_uses_several_dops_and_moves_and_evicts_nothing() -> None:
    stats = simulate("esp", [16384] * 4, mixed_workload(80, request_rate=16, seed=1)).stats
    assert stats.num_batches_by_dop.keys() > {1}
    assert (stats.num_migrated_tokens, stats.num_preemptions) == (0, 0)


def test_the_same_requests_are_planned_the_same_again() -> None:
    first, second = (
        simulate("esp", [9000] * 4, mixed_workload(60, request_rate=30, seed=2)) for _ in range(2)
    )
    assert first.plans == second.plans


def test_longer_prompts_get_more_instances() -> None:
    dops = [
        max(
            batch.group.dop
            for batch in batches_of(simulate("esp", [900_000] * 4, [timed_request(0, n, 4)], cost_model=H200))
        )
        for n in (30, 300, 2500, 70_000)
    ]
    assert dops == sorted(dops)
    assert dops[0] == 1
    assert dops[-1] == 4


def test_a_long_prompt_decodes_on_one_instance_that_reads_its_kv_on_the_others() -> None:
    run = simulate("esp", [16384] * 4, [timed_request(0, 4000, 20)])
    first, *decodes = batches_of(run)
    assert first.group.dop == len({segment.instance_id for segment in first.writes}) == 4
    assert {batch.group.dop for batch in decodes} == {1}
    assert (run.stats.num_migrated_tokens, run.stats.num_retained_tokens) == (0, 0)


def test_short_prompts_hardly_notice_a_very_long_one() -> None:
    shorts = [timed_request(n, 512, 2, n * 0.1) for n in range(1, 150)]
    long = timed_request(0, 300_000, 2, 1.03)
    capacities = [H200_CAPACITY] * 8
    both = simulate("esp", capacities, in_order(long, *shorts), cost_model=H200)
    only_long = simulate("esp", capacities, [long], cost_model=H200)
    assert p99([both.ttft(short) for short in shorts]) <= 1.5 * prefill_time(H200, 512, 0, 1)
    assert both.ttft(long) <= 1.5 * only_long.ttft(long)


def test_short_prompts_wait_a_step_where_a_long_one_took_all_before_they_came() -> None:
    shorts = [timed_request(n, 512, 8, n * 0.1) for n in range(1, 60)]
    long = timed_request(0, 200_000, 8)
    run = simulate("esp", [H200_CAPACITY] * 8, [long, *shorts], cost_model=H200)
    assert max(run.ttft(short) for short in shorts) < 2 * PolicyConfig().step_time
    alone = simulate("esp", [H200_CAPACITY] * 8, [long], cost_model=H200)
    assert run.ttft(long) <= 1.5 * alone.ttft(long)


def test_a_long_prompt_stops_at_a_chunk_boundary_for_urgent_ones_and_goes_on_after_them() -> None:
    long = timed_request(0, 200_000, 8)
    urgent = [replace(timed_request(n, 4000, 8, 1.0), slo=SLO(0.6, 1.0)) for n in range(1, 17)]
    run = simulate("esp", [H200_CAPACITY] * 4, [long, *urgent], cost_model=H200)
    first_token = run.token_times["r000"][0]
    chunks = [
        num_computed(batch, "r000")
        for snapshot, plan in run.plans
        if snapshot.now < first_token
        for batch in plan.batches
    ]
    assert chunks[0] > 0
    assert 0 in chunks
    assert chunks[-1] > 0
    assert max(run.ttft(request) for request in urgent) <= 0.6
    alone = simulate("esp", [H200_CAPACITY] * 4, [long], cost_model=H200)
    assert run.ttft(long) < alone.ttft(long) + sum(prefill_time(H200, 4000, 0, 4) for _ in urgent) + 0.5


@pytest.mark.parametrize(("deferred_share", "is_served"), [(0.2, True), (0.0, False)])
def test_a_prompt_that_was_deferred_ends_though_short_ones_alone_fill_the_cluster(
    deferred_share: float, is_served: bool
) -> None:
    shorts = [timed_request(n, 8000, 4, n / 13) for n in range(1, 90)]
    long = timed_request(0, 20_000, 4, 1.003)
    capacities, config = [H200_CAPACITY] * 2, PolicyConfig(deferred_share=deferred_share)
    run = simulate("esp", capacities, in_order(long, *shorts), cost_model=H200, config=config)
    assert (run.token_times["r000"][0] < shorts[-1].arrival_time) == is_served


def test_decodes_beside_a_very_long_prompt_keep_their_pace() -> None:
    chats = [timed_request(n, 200, 100, n * 0.01) for n in range(1, 30)]
    run = simulate(
        "esp", [H200_CAPACITY] * 2, in_order(timed_request(0, 100_000, 4, 0.2), *chats), cost_model=H200
    )
    for chat in chats:
        times = run.token_times[chat.request_id]
        assert (times[-1] - times[0]) / (len(times) - 1) <= PolicyConfig().target_tpot


def test_decodes_beside_a_stream_of_short_prompts_and_a_very_long_one_keep_their_pace_too() -> None:
    config = PolicyConfig(target_tpot=0.012)
    chats = [timed_request(n, 500, 60, n * 0.02) for n in range(1, 120)]
    long = timed_request(0, 600_000, 4, 0.001)
    run = simulate("esp", [H200_CAPACITY] * 4, [long, *chats], cost_model=H200, config=config)
    assert run.token_times["r000"][0] > chats[-1].arrival_time
    for chat in chats:
        times = run.token_times[chat.request_id]
        assert (times[-1] - times[0]) / (len(times) - 1) <= config.target_tpot


def test_a_prompt_that_finds_only_leases_begins_at_the_end_of_their_step() -> None:
    first, second = timed_request(0, 20, 300), timed_request(1, 20, 4, 0.1)
    run = simulate("esp", [16384], [first, second])
    assert run.ttft(second) < 3 * prefill_time(CPU, 20, 0, 1)


def test_decode_rides_along_with_a_prefill_that_takes_its_instance() -> None:
    decoding_one, long = timed_request(0, 20, 100), timed_request(1, 7000, 4, 0.05)
    run = simulate("esp", [16384], [decoding_one, long])
    mixed = [batch for batch in batches_of(run) if len(batch.request_ids) == 2 and batch.num_steps == 1]
    assert mixed
    gaps = [b - a for a, b in pairwise(run.token_times["r000"])]
    assert max(gaps) < 2 * PolicyConfig().target_tpot


def planned(snapshot: Snapshot, config: PolicyConfig | None = None) -> IterationPlan:
    return plan_esp(snapshot, H200, config or PolicyConfig())


@pytest.mark.parametrize(
    ("capacity", "num_waiting", "num_steps"),
    [
        (10_000, 0, 128),
        (10_000, 1, 16),  # a prompt that waits for room
        (220, 0, 55),  # half of the room is left for the next prompt
        (130, 0, 16),
    ],
)
def test_leases_are_long_while_no_prompt_waits_and_room_abounds(
    capacity: int, num_waiting: int, num_steps: int
) -> None:
    view = decoding("d", 110, (0,), max_tokens=500)
    too_long = [waiting(f"w{n}", 9_950) for n in range(num_waiting)]
    (batch,) = planned(snapshot_of([capacity], [view, *too_long])).batches
    assert batch.num_steps == num_steps


def test_nothing_is_planned_while_every_instance_is_in_a_step() -> None:
    view = waiting("a", 9)
    plan = replace(decode([decoding("b", 9, (0,))], (0,), {"b": 0}), predicted_time=0.1)
    snapshot = snapshot_of([999], [decoding("b", 9, (0,)), view], [running(0, plan)])
    assert replace(planned(snapshot), decisions=()) == IterationPlan()


def test_all_end_after_a_loss_that_leaves_room_for_one_at_a_time() -> None:
    requests = [timed_request(n, 40, 45, n * 1e-3) for n in range(3)]
    run = simulate("esp", [130, 130], requests, incidents=[InstanceLost(0.1, 0)])
    assert all(len(run.tokens[request.request_id]) == 45 for request in requests)


def test_nobody_gives_way_while_anything_is_in_flight() -> None:
    full, flying = decoding("full", 100, (0,), 99), decoding("flying", 99, (1,), 99)
    batch = running(0, replace(decode([flying], (1,), {"flying": 1}), predicted_time=0.1))
    plan = planned(snapshot_of([100, 100], [full, flying], [batch]))
    assert replace(plan, decisions=()) == IterationPlan()


def test_one_alone_never_gives_way() -> None:
    assert planned(snapshot_of([100], [decoding("full", 100, (0,), 99)])).preemptions == ()


def test_no_decode_waits_for_slots_that_other_instances_have() -> None:
    random, now, requests = Random(1), 0.0, []
    for number in range(40):
        now += random.expovariate(3)
        requests.append(timed_request(number, random.randint(4000, 12000), 300, now))
    run = simulate("esp", [13000] * 4, requests, cost_model=H200)
    gaps = [later - earlier for times in run.token_times.values() for earlier, later in pairwise(times)]
    assert max(gaps) < 0.3  # the decode instances alone would have let some wait for 0.8 s
