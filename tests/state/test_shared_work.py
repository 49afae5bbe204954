"""Requests that need the same KV next: one computes it, and all others begin with it."""

import pytest
from shared_prefixes import PrefixCluster

from loong.core.events import InstanceDraining, InstanceJoined, InstanceLost, MigrationFinished
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.placement import KVSegment
from loong.core.plan import IterationPlan, KVMigration
from loong.core.request import FinishReason

PROMPT = tuple(range(100, 120))


def crowd(*request_ids: str) -> PrefixCluster:
    """Return a cluster in which requests with one prompt wait."""
    cluster = PrefixCluster()
    for request_id in request_ids:
        cluster.arrive(request_id, PROMPT)
    return cluster


def num_cached(cluster: PrefixCluster, request_id: str) -> int:
    return len({p for c in cluster.view(request_id).cached for p in c.segment.positions})


def test_of_many_equal_prompts_one_is_computed_and_all_others_read_it() -> None:
    names = [f"r{i:02}" for i in range(64)]
    cluster = crowd(*names)
    assert cluster.visible == names[:1]
    assert cluster.following == names[1:]
    cluster.run(names[0], 12)
    assert cluster.visible == names[:1]
    cluster.run(names[0])
    assert cluster.visible == names
    assert cluster.following == []
    assert {num_cached(cluster, name) for name in names[1:]} == {len(PROMPT) - 1}
    for name in names[1:]:
        cluster.run(name)
    stats = cluster.snapshot().stats
    assert stats.num_computed_tokens == len(PROMPT) + 63
    assert stats.num_cached_tokens == 63 * (len(PROMPT) - 1)
    assert cluster.snapshot().instances[0].kv_used == len(PROMPT) + 63
    for name in names:
        cluster.abort(name)
    instance = cluster.snapshot().instances[0]
    assert (instance.kv_used, instance.kv_cached) == (0, len(PROMPT))
    assert not cluster.state._requests.by_id


def test_a_prompt_goes_on_by_itself_where_it_differs_from_the_one_that_it_follows() -> None:
    cluster = PrefixCluster()
    cluster.arrive("a", PROMPT)
    cluster.arrive("b", (*PROMPT[:10], *range(30)))
    assert cluster.following == ["b"]
    cluster.run("a", 8)
    assert cluster.following == ["b"]
    cluster.run("a", 4)
    assert cluster.following == []
    assert num_cached(cluster, "b") == 10


@pytest.mark.parametrize("has_begun", [False, True])
def test_another_takes_the_place_of_one_that_is_aborted(has_begun: bool) -> None:
    cluster = crowd("a", "b", "c")
    if has_begun:
        cluster.run("a", 8)
    cluster.abort("a")
    assert (cluster.visible, cluster.following) == (["b"], ["c"])
    assert num_cached(cluster, "b") == 8 * has_begun


def test_another_takes_the_place_of_one_that_is_aborted_while_it_is_computed() -> None:
    cluster = crowd("a", "b", "c")
    batch_id = cluster.begin("a", 8)
    cluster.abort("a")
    assert (cluster.visible, cluster.following) == (["a", "b"], ["c"])
    cluster.finish(batch_id)
    assert (cluster.visible, cluster.following) == (["b"], ["c"])
    assert num_cached(cluster, "b") == 8


def test_of_one_that_is_aborted_only_what_batches_have_computed_is_read() -> None:
    cluster = crowd("a")
    cluster.run("a", 8)
    batch_id = cluster.begin("a", 8)
    cluster.abort("a")
    cluster.arrive("b", PROMPT)
    assert num_cached(cluster, "b") <= 8
    cluster.finish(batch_id)
    assert num_cached(cluster, "b") == 16


def test_one_that_follows_is_aborted_unseen() -> None:
    cluster = crowd("a", "b", "c")
    cluster.abort("b")
    assert (cluster.visible, cluster.following) == (["a"], ["c"])
    cluster.run("a")
    assert cluster.visible == ["a", "c"]


def test_one_that_is_preempted_begins_with_its_own_kv_and_is_first_again() -> None:
    cluster = crowd("a", "b")
    cluster.run("a", 8)
    cluster.preempt("a")
    assert (cluster.visible, cluster.following) == (["a"], ["b"])
    assert num_cached(cluster, "a") == 8
    cluster.run("a")
    assert num_cached(cluster, "b") == len(PROMPT) - 1


def test_an_ended_request_leaves_its_output_for_the_next_turn() -> None:
    cluster = crowd("a")
    cluster.run("a", token_id=5)
    cluster.run_to_end("a")
    cluster.arrive("b", (*PROMPT, 5, 0, 77, 78))
    assert num_cached(cluster, "b") == len(PROMPT) + 1
    cluster.run_to_end("b")
    instance = cluster.snapshot().instances[0]
    assert (instance.kv_used, instance.kv_cached) == (0, len(PROMPT) + 4)


def test_of_those_that_need_the_same_the_one_with_the_highest_priority_goes_on() -> None:
    cluster = PrefixCluster()
    for number, priority in enumerate((0, 2, 1)):
        cluster.arrive(f"r{number}", PROMPT, priority=priority)
    assert (cluster.visible, cluster.following) == (["r1"], ["r0", "r2"])


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    cluster = PrefixCluster()
    cluster.arrive("long", (*PROMPT, *range(200)))
    assert cluster.visible == ["long"]
    cluster.arrive("short", PROMPT)
    assert (cluster.visible, cluster.following) == (["short"], ["long"])
    cluster.run("short")
    assert cluster.visible == ["long", "short"]


def test_a_long_prompt_that_pauses_holds_nobody_up() -> None:
    cluster = PrefixCluster()
    cluster.arrive("long", (*PROMPT, *range(200)))
    cluster.run("long", 8)
    cluster.arrive("short", PROMPT)
    assert (cluster.visible, cluster.following) == (["long", "short"], [])
    assert num_cached(cluster, "short") == 8
    cluster.arrive("other", PROMPT)
    assert cluster.following == ["other"]
    batch_id = cluster.begin("long", 4)
    assert cluster.following == ["other", "short"]  # what they need is in computation now
    cluster.finish(batch_id)
    assert cluster.following == ["other"]


def test_nobody_waits_for_an_end_that_is_predicted_and_then_there() -> None:
    cluster = PrefixCluster()
    cluster.arrive("a", PROMPT)
    first = cluster.begin("a", 8)
    cluster.predict_end(first)
    cluster.arrive("b", PROMPT)
    assert cluster.following == ["b"]
    second = cluster.begin("a", 8)
    cluster.finish(first)
    assert cluster.following == ["b"]  # and not first in computing again what is there
    cluster.finish(second)
    cluster.run("a")
    assert num_cached(cluster, "b") == len(PROMPT) - 1


def test_prompts_that_are_scored_are_computed_whole_and_wait_for_nobody() -> None:
    cluster = crowd("a")
    for request_id in "bc":
        cluster.arrive(request_id, PROMPT, num_prompt_logprobs=1)
    assert (cluster.visible, cluster.following) == (["a", "b", "c"], [])
    cluster.run("a")
    assert num_cached(cluster, "b") == 0
    cluster.run("b")
    cluster.arrive("d", PROMPT)
    assert num_cached(cluster, "d") == len(PROMPT) - 1


@pytest.mark.parametrize("changes", [{"cache_salt": "other"}, {"uses_cache": False}])
def test_requests_with_another_salt_or_without_cache_share_nothing(changes: dict[str, object]) -> None:
    cluster = crowd("a")
    cluster.arrive("b", PROMPT, **changes)
    assert cluster.following == []
    cluster.run("a")
    assert num_cached(cluster, "b") == 0


def test_a_range_stands_for_tokens_that_nobody_else_has() -> None:
    cluster = PrefixCluster()
    for request_id in "ab":
        cluster.arrive(request_id, range(20))
    assert cluster.following == []
    cluster.run_to_end("a")
    assert cluster.snapshot().instances[0].kv_cached == 0


def test_choices_follow_with_their_primary_and_the_next_takes_its_place() -> None:
    cluster = PrefixCluster()
    cluster.arrive("a", PROMPT)
    cluster.arrive("b", PROMPT, num_choices=3)
    assert cluster.following == ["b"]
    cluster.abort("b")
    assert cluster.following == ["b-1"]
    cluster.run("a")
    assert cluster.visible == ["a", "b-1"]
    cluster.run("b-1")
    assert cluster.visible == ["a", "b-1", "b-2"]
    assert cluster.snapshot().instances[0].kv_used == len(PROMPT) + 1


@pytest.mark.parametrize("uses_cache", [False, True])
def test_choices_keep_no_kv_that_nobody_else_may_read(uses_cache: bool) -> None:
    cluster = PrefixCluster()
    cluster.arrive("a", PROMPT, num_choices=3, uses_cache=uses_cache)
    cluster.run("a")
    for request_id in ("a", "a-2"):
        cluster.abort(request_id)
    assert cluster.snapshot().instances[0].kv_used == len(PROMPT)
    cluster.arrive("a", PROMPT, num_choices=1, uses_cache=uses_cache)  # ids may be used again
    cluster.abort("a")
    cluster.abort("a-1")
    instance = cluster.snapshot().instances[0]
    assert (instance.kv_used, instance.kv_cached) == (0, len(PROMPT) * uses_cache)


def test_choices_share_what_was_computed_twice_and_keep_one_of_it() -> None:
    cluster = PrefixCluster()
    cluster.arrive("long", (*PROMPT, 1, 2, 3))
    cluster.run("long", 1)
    cluster.arrive("a", PROMPT, num_choices=2, num_prompt_logprobs=0)
    cluster.run("a")
    assert cluster.snapshot().instances[0].kv_used == len(PROMPT) + 1
    for request_id in ("a", "a-1"):
        cluster.abort(request_id)
    instance = cluster.snapshot().instances[0]
    assert (instance.kv_used, instance.kv_cached) == (1, len(PROMPT) - 1)


def test_kv_on_a_lost_instance_is_computed_again_by_one_for_all() -> None:
    cluster = crowd("a", "b")
    cluster.run("a", 12)
    cluster.state.apply(InstanceLost(99.0, 0))
    cluster.state.apply(InstanceJoined(99.0, ElasticInstance(0, 1, InstanceKind.FULL, 1000)))
    assert (cluster.visible, cluster.following) == (["a"], ["b"])
    cluster.run("a")
    assert num_cached(cluster, "b") == len(PROMPT) - 1


def test_kv_that_is_read_stays_on_a_draining_instance_until_it_moves_away() -> None:
    cluster = crowd("a", "b")
    cluster.run("a")
    cluster.run("b")
    cluster.abort("a")
    cluster.state.apply(InstanceDraining(99.0, 0))
    instance = cluster.snapshot().instance[0]
    assert (instance.kv_used, instance.kv_cached) == (len(PROMPT), 0)
    segments = cluster.view("b").placement.segments
    moves = tuple(KVMigration(segment, 1) for segment in segments)
    cluster.state.commit(IterationPlan(migrations=moves), cluster.snapshot())
    last_id = cluster.state.last_id
    for migration_id in range(last_id - len(moves) + 1, last_id + 1):
        cluster.state.apply(MigrationFinished(99.0, migration_id, is_committed=True))
    assert cluster.snapshot().drained_ids == {0}
    assert {s.instance_id for s in cluster.view("b").placement.segments} == {1}
    cluster.abort("b")
    instance = cluster.snapshot().instance[1]
    assert (instance.kv_used, instance.kv_cached) == (0, len(PROMPT))


def test_what_a_copy_leaves_behind_is_still_there_for_others() -> None:
    cluster = crowd("a", "b")
    cluster.run("a", 12)
    cluster.state.commit(
        IterationPlan(migrations=(KVMigration(KVSegment("a", range(12), 0), 1),)), cluster.snapshot()
    )
    cluster.state.apply(MigrationFinished(99.0, cluster.state.last_id, is_committed=True))
    instances = cluster.snapshot().instances
    assert [(i.kv_used, i.kv_cached) for i in instances] == [(0, 12), (12, 0)]
    cluster.finish(cluster.begin("a", group=(1,)))
    assert num_cached(cluster, "b") == len(PROMPT) - 1


def test_kv_of_a_request_that_failed_is_not_kept() -> None:
    cluster = crowd("a", "b")
    cluster.run("a", 8)
    assert cluster.snapshot().instances[0].kv_used == 8
    cluster.run("a", finish_reason=FinishReason.ERROR)
    assert all(i.kv_used == i.kv_cached == 0 for i in cluster.snapshot().instances)
    assert num_cached(cluster, "b") == 0


def test_what_nobody_reads_goes_when_its_room_is_needed() -> None:
    cluster = PrefixCluster(num_instances=1, kv_capacity=30)
    cluster.arrive("a", PROMPT)
    cluster.run_to_end("a")
    cluster.arrive("b", tuple(range(15)))
    cluster.run("b")
    instance = cluster.snapshot().instances[0]
    assert (instance.kv_used, instance.kv_cached) == (15, 15)
    cluster.arrive("c", PROMPT)
    assert [c.segment.positions for c in cluster.view("c").cached] == [range(15)]
