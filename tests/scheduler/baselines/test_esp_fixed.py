"""`esp-fixed-N` is `esp` on groups of N instances that never change."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from machines import CPU, H200, H200_CAPACITY
from simulation import Run, instances_with, simulate, timed_request
from snapshots import begun, decoding, snapshot_of, waiting

from loong.core.errors import ConfigError
from loong.core.plan import BatchPlan
from loong.core.request import Request
from loong.core.snapshot import Snapshot
from loong.scheduler.common.planning_view import make_planning_view
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.prompt_order import Ordering, by_deadline, ordered
from loong.scheduler.esp.reasons import WaitReason
from loong.scheduler.policy import admissible_tokens, make_policy
from loong.scheduler.tuning import MAX_CONSIDERED

FOUR = [H200_CAPACITY] * 4


def mixed() -> list[Request]:
    """Return long and short prompts that overlap."""
    return [timed_request(n, (300, 6000, 60_000)[n % 3] + 37 * n, 20, n * 0.05) for n in range(18)]


def batches_of(run: Run) -> Iterator[BatchPlan]:
    return (batch for _, plan in run.plans for batch in plan.batches)


def chosen(snapshot: Snapshot, name: str = "esp-fixed-1") -> dict[str, tuple[int, ...]]:
    """Return the group of each request that begins."""
    plan = make_policy(name, PolicyConfig())(snapshot, CPU)
    return {r: batch.group.instance_ids for batch in plan.batches for r in batch.request_ids}


def test_a_single_instance_is_planned_as_by_esp() -> None:
    plans = [simulate(name, FOUR[:1], mixed(), cost_model=H200).plans for name in ("esp", "esp-fixed-1")]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_batch_is_of_a_whole_group_and_a_request_stays_in_one(size: int) -> None:
    run = simulate(f"esp-fixed-{size}", FOUR, mixed(), cost_model=H200)
    groups = {tuple(range(first, first + size)) for first in range(0, 4, size)}
    assert {batch.group.instance_ids for batch in batches_of(run)} == groups
    groups_of: dict[str, set[tuple[int, ...]]] = {}
    for batch in batches_of(run):
        for request_id in batch.request_ids:
            groups_of.setdefault(request_id, set()).add(batch.group.instance_ids)
    assert {len(some) for some in groups_of.values()} == {1}
    stats = run.stats
    assert (stats.num_scale_ups, stats.num_scale_downs, stats.num_migrated_tokens) == (0, 0, 0)
    assert (stats.num_retained_tokens, stats.num_preemptions) == (0, 0)


def test_a_long_prompt_goes_in_chunks_beside_decodes() -> None:
    run = simulate(
        "esp-fixed-4", FOUR, [timed_request(0, 50, 400), timed_request(1, 100_000, 4, 0.1)], cost_model=H200
    )
    both = [batch for batch in batches_of(run) if len(batch.request_ids) == 2]
    assert len(both) > 1


def test_a_prompt_goes_to_the_group_with_least_work_and_then_to_the_roomiest() -> None:
    busy = begun("long", 3000, 500, (0,))
    assert chosen(snapshot_of([9000] * 2, [busy, waiting("new", 50)]))["new"] == (1,)
    assert chosen(snapshot_of([8000, 9000, 8500], [waiting("new", 50)])) == {"new": (1,)}
    crowded = [decoding(f"d{n}", 100, (0,)) for n in range(3)]
    assert chosen(snapshot_of([9000] * 2, [*crowded, waiting("new", 50)]))["new"] == (1,)


def test_prompts_that_come_together_are_spread_over_the_groups() -> None:
    groups = chosen(snapshot_of([9000] * 4, [waiting(f"w{n}", 200) for n in range(8)]))
    assert sorted(groups.values()) == [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]


def test_a_prompt_goes_where_it_has_room_though_another_group_has_less_work() -> None:
    views = [decoding("d", 700, (0,)), begun("p", 500, 100, (1,)), waiting("new", 400)]
    assert chosen(snapshot_of([1000, 2000], views))["new"] == (1,)


def test_a_prompt_too_long_for_each_group_until_an_instance_returns_delays_no_other() -> None:
    """Instance 2 is being started again, and the KV of two requests that need it stays where it is."""
    views = [begun(f"b{i}", 3000, 900, (i,)) for i in (0, 1)]
    views += [waiting("new", 150), waiting("short", 50)]
    snapshot = replace(snapshot_of([1000] * 2, views), returning={2: 5000})
    assert chosen(snapshot) == {"short": (0,)}


def test_default_targets_are_those_of_esp() -> None:
    long = waiting("new", 400_000)
    ordering = Ordering.of(by_deadline, 4, H200, PolicyConfig())
    queues = (make_planning_view(snapshot_of(capacities, [long])).queue for capacities in (FOUR, FOUR[:1]))
    whole, part = (ordered([long], queue, ordering)[0].ttft for queue in queues)
    assert whole == part


def test_of_a_crowd_those_that_no_plan_considers_are_reported() -> None:
    crowd = [waiting(f"w{n:04}", 10, arrival_time=n * 1e-6) for n in range(MAX_CONSIDERED + 3)]
    plan = make_policy("esp-fixed-1", PolicyConfig())(snapshot_of([9000] * 2, crowd, now=1.0), CPU)
    (left_out,) = [d for d in plan.decisions if d.chosen == WaitReason.NOT_CONSIDERED]
    assert len(left_out.request_ids) == 3


@pytest.mark.parametrize(("size", "num_instances"), [(3, 8), (16, 8), (2, 1)])
def test_a_size_that_does_not_divide_the_instances_is_refused_with_both_numbers(
    size: int, num_instances: int
) -> None:
    complaint = (
        f"esp-fixed-{size} runs groups of {size} instances, .* is {num_instances}, which {size} does not"
    )
    with pytest.raises(ConfigError, match=complaint):
        admissible_tokens(f"esp-fixed-{size}", instances_with([100] * num_instances))


def test_a_request_may_fill_one_group() -> None:
    instances = instances_with([100, 40, 30, 70])
    sizes = {size: admissible_tokens(f"esp-fixed-{size}", instances) for size in (1, 2, 4)}
    assert sizes == {1: 100, 2: 140, 4: 240}
