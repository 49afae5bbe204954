"""Copies of KV that several requests may read: made, read, lost and dropped, while batches run."""

from collections.abc import Sequence

import pytest
from shared_prefixes import PrefixCluster

from loong.core.errors import InvalidPlanError
from loong.core.events import Event, InstanceDraining, InstanceLost, MigrationFinished, PrefixCacheReset
from loong.core.instance import MAX_MOVING_TOKENS, ElasticInstance, InstanceKind
from loong.core.instructions import ReleaseKV, ShareKV
from loong.core.placement import InstanceId, KVSegment, OwnerView
from loong.core.plan import Borrowing, Eviction, IterationPlan, KVMigration
from loong.core.request import FinishReason
from loong.state.cluster_state import ClusterState

PROMPT = tuple(range(100, 120))
HOST = 2


def cached_cluster(kv_capacity: int = 100) -> PrefixCluster:
    """Return two instances and a host tier; instance 0 has the KV of a prompt that nobody reads."""
    cluster = PrefixCluster(2, kv_capacity)
    tier = ElasticInstance(HOST, 1, InstanceKind.HOST, kv_capacity)
    instances = (*cluster.snapshot().instances, tier)
    cluster.state = ClusterState(instances, keeps_prefixes=True)
    cluster.arrive("first", PROMPT)
    cluster.run_to_end("first")
    return cluster


def owner(cluster: PrefixCluster) -> OwnerView:
    (found,) = cluster.snapshot().owners.values()
    return found


def places(cluster: PrefixCluster) -> dict[InstanceId, int]:
    """Return the tokens that the owner of the prompt has on each instance."""
    owners = cluster.snapshot().owners.values()
    return {i: n for found in owners for i, n in found.placement.tokens_by_instance().items()}


def migration(
    cluster: PrefixCluster,
    destination_id: InstanceId,
    source_id: InstanceId = 0,
    *,
    keeps_source: bool = True,
) -> KVMigration:
    segment = KVSegment(owner(cluster).owner_id, range(len(PROMPT)), source_id)
    return KVMigration(segment, destination_id, keeps_source)


def begin_move(cluster: PrefixCluster, moved: KVMigration) -> int:
    cluster.state.commit(IterationPlan(migrations=(moved,)), cluster.snapshot())
    return cluster.state.last_id


def end_move(cluster: PrefixCluster, migration_id: int, *, is_committed: bool = True) -> None:
    cluster.state.apply(MigrationFinished(next(cluster.times), migration_id, is_committed))


def copy(cluster: PrefixCluster, destination_id: InstanceId = 1, **kept: bool) -> None:
    end_move(cluster, begin_move(cluster, migration(cluster, destination_id, **kept)))


def begin_reading(cluster: PrefixCluster, request_id: str, instance_id: InstanceId) -> int:
    """Begin a batch of a request that reads the copy on one instance."""
    cached = [c.segment for c in cluster.view(request_id).cached if c.segment.instance_id == instance_id]
    view = cluster.view(request_id).borrowing(cached)
    return cluster.begin_with(view, Borrowing(request_id, tuple(cached)), (instance_id,))


def counts(cluster: PrefixCluster) -> list[tuple[int, int]]:
    return [(i.kv_used, i.kv_cached) for i in cluster.snapshot().instances]


def readers(cluster: PrefixCluster, request_ids: Sequence[str]) -> list[int]:
    """Return where requests read the first token of the prompt."""
    held = ((r, cluster.view(r).placement.segments) for r in request_ids)
    return [next(s.instance_id for s in segments if 0 in s.positions) for _, segments in held]


def test_a_copy_keeps_its_source_and_requests_read_one_each() -> None:
    cluster = cached_cluster()
    cluster.arrive("a", PROMPT)
    cluster.arrive("b", PROMPT)
    moving = begin_move(cluster, migration(cluster, 1))
    assert counts(cluster) == [(20, 0), (20, 0), (0, 0)]  # the source is read, and the copy has its room
    end_move(cluster, moving)
    assert counts(cluster) == [(0, 20), (0, 20), (0, 0)]
    cached = [(c.segment.instance_id, len(c.segment.positions)) for c in cluster.view("a").cached]
    assert cached == [(0, 19), (1, 19)]
    begin_reading(cluster, "a", 0)
    begin_reading(cluster, "b", 1)
    assert counts(cluster) == [(20, 1), (20, 1), (0, 0)]
    assert cluster.snapshot().stats.num_copied_tokens == 20


@pytest.mark.parametrize("lost_id", [0, 1])
def test_the_loss_of_either_copy_leaves_its_readers_the_other(lost_id: int) -> None:
    cluster = cached_cluster()
    cluster.arrive("a", PROMPT)
    cluster.arrive("b", PROMPT)
    copy(cluster)
    for request_id, instance_id in (("a", 0), ("b", 1)):
        cluster.finish(begin_reading(cluster, request_id, instance_id))
    cluster.state.apply(InstanceLost(next(cluster.times), lost_id))
    assert readers(cluster, "ab") == [1 - lost_id] * 2
    stats = cluster.snapshot().stats
    assert stats.num_switched_tokens == 19
    missing = cluster.view("ab"[lost_id]).missing
    assert [len(positions) for positions in missing] == [2]  # what it had computed itself, and the next


def test_users_of_kv_that_moves_stay_until_their_next_boundary() -> None:
    cluster = cached_cluster()
    cluster.arrive("a", PROMPT)
    cluster.arrive("b", PROMPT)
    running = begin_reading(cluster, "a", 0)
    copy(cluster, keeps_source=False)
    assert places(cluster) == {0: 19, 1: 20}
    assert {c.segment.instance_id for c in cluster.view("b").cached} == {1}
    assert readers(cluster, "a") == [0]
    cluster.finish(running)
    assert readers(cluster, "a") == [1]
    assert places(cluster) == {0: 1, 1: 20}  # of its own, it has given the last token to others


def test_kv_goes_to_a_host_tier_and_comes_back() -> None:
    cluster = cached_cluster()
    cluster.arrive("a", PROMPT)
    copy(cluster, HOST, keeps_source=False)
    assert counts(cluster) == [(0, 0), (0, 0), (0, 20)]
    end_move(cluster, begin_move(cluster, migration(cluster, 1, HOST)))
    assert counts(cluster) == [(0, 0), (0, 20), (0, 20)]
    cluster.finish(begin_reading(cluster, "a", 1))
    assert cluster.snapshot().stats.num_cached_tokens == 19


def test_a_move_to_a_host_tier_leaves_what_is_read() -> None:
    cluster = cached_cluster()
    cluster.arrive("a", PROMPT)
    moving = begin_move(cluster, migration(cluster, HOST, keeps_source=False))
    begin_reading(cluster, "a", 0)
    end_move(cluster, moving)
    assert places(cluster) == {0: 19, HOST: 20}


def test_copies_go_before_kv_that_is_nowhere_else() -> None:
    cluster = cached_cluster(kv_capacity=50)
    other = tuple(range(200, 220))
    cluster.arrive("a", PROMPT)  # it waits, so that the owner is shown
    copy(cluster)
    cluster.arrive("other", other)
    cluster.finish(cluster.begin("other", group=(1,)))
    cluster.arrive("new", tuple(range(300, 325)))
    cluster.begin("new", group=(1,))
    assert places(cluster)[0] == 20
    assert places(cluster)[1] == 5  # less than what the new one takes


def test_a_copy_goes_first_only_where_kv_stays_less_long() -> None:
    cluster = PrefixCluster(2, 50)
    for number, (instance_id, num_tokens) in enumerate(((0, 20), (1, 20), (1, 20), (1, 25))):
        cluster.arrive(f"old {number}", tuple(range(n := 1000 * number + 1000, n + num_tokens)))
        running = cluster.begin(f"old {number}", group=(instance_id,))  # the last one evicts another
        cluster.finish(running, token_id=0, finish_reason=FinishReason.STOP)
    cluster.arrive("first", PROMPT)
    cluster.run_to_end("first")
    cluster.arrive("a", PROMPT)
    (copied,) = {c.segment.owner_id for c in cluster.view("a").cached}
    segment = KVSegment(copied, range(len(PROMPT)), 0)
    end_move(cluster, begin_move(cluster, KVMigration(segment, 1, keeps_source=True)))
    cluster.arrive("new", tuple(range(900, 920)))
    cluster.begin("new", group=(0,))
    assert cluster.snapshot().owners[copied].placement.tokens_by_instance() == {0: 20, 1: 20}
    cluster.arrive("newer", tuple(range(950, 970)))
    cluster.begin("newer", group=(1,))
    assert cluster.snapshot().owners[copied].placement.tokens_by_instance() == {0: 20}


@pytest.mark.parametrize("is_committed", [False, True])
def test_nothing_is_left_of_a_copy_in_flight_after_a_reset(*, is_committed: bool) -> None:
    cluster = cached_cluster()
    cluster.arrive("a", PROMPT)
    moving = begin_move(cluster, migration(cluster, 1))
    cluster.state.apply(PrefixCacheReset(next(cluster.times)))
    assert counts(cluster) == [(0, 0), (20, 0), (0, 0)]
    end_move(cluster, moving, is_committed=is_committed)
    assert counts(cluster) == [(0, 0)] * 3
    assert cluster.view("a").cached == ()


def test_readers_leave_a_draining_instance_for_a_copy() -> None:
    cluster = cached_cluster()
    cluster.arrive("a", PROMPT)
    copy(cluster)
    cluster.finish(begin_reading(cluster, "a", 0))
    cluster.state.apply(InstanceDraining(next(cluster.times), 0))
    assert readers(cluster, "a") == [1]
    assert counts(cluster)[0] == (1, 0)  # the token that it has computed there itself


def test_what_is_lost_with_an_instance_neither_arrives_nor_stays() -> None:
    for lost_id in (0, 1):
        cluster = cached_cluster()
        cluster.arrive("a", PROMPT)
        begin_move(cluster, migration(cluster, 1))
        cluster.state.apply(InstanceLost(next(cluster.times), lost_id))
        assert [sum(pair) for pair in counts(cluster)] == [20 if lost_id else 0, 0]


def test_nothing_is_released_on_a_draining_instance_that_is_lost_with_a_move_from_it() -> None:
    cluster = cached_cluster()
    cluster.arrive("a", PROMPT)
    begin_move(cluster, migration(cluster, 1))
    cluster.state.apply(InstanceDraining(next(cluster.times), 0))
    instructions = cluster.state.apply(InstanceLost(next(cluster.times), 0)).instructions
    released = [i.instance_ids for i in instructions if isinstance(i, ReleaseKV)]
    assert released == [(1,)]


@pytest.mark.parametrize("end", ["source lost", "failed"])
def test_room_for_kv_that_does_not_arrive_is_released_before_a_copy_there_is_read(end: str) -> None:
    cluster = cached_cluster()
    cluster.arrive("a", PROMPT)
    copy(cluster)
    cluster.finish(begin_reading(cluster, "a", 0))
    (read, *_) = cluster.view("a").placement.segments
    moved = begin_move(cluster, KVMigration(read, 1))
    if end == "failed":
        cluster.state.apply(InstanceDraining(next(cluster.times), 0))
        ended: Event = MigrationFinished(next(cluster.times), moved, is_committed=False)
    else:
        ended = InstanceLost(next(cluster.times), 0)
    of_request = [
        instruction
        for instruction in cluster.state.apply(ended).instructions
        if (
            isinstance(instruction, ReleaseKV)
            and (instruction.owner_id, instruction.instance_ids) == ("a", (1,))
        )
        or (isinstance(instruction, ShareKV) and instruction.user_id == "a")
    ]
    assert [type(instruction) for instruction in of_request] == [ReleaseKV, ShareKV]
    assert readers(cluster, "a") == [1]


def test_plans_that_break_the_rules_of_copies_are_refused() -> None:
    cluster = cached_cluster()
    cluster.arrive("a", PROMPT)
    whole = migration(cluster, 1)
    part = whole.segment._replace(positions=range(4))
    away = whole.segment._replace(positions=range(18, 23))
    refused = [
        ((KVMigration(away, 1, keeps_source=True),), (), "is not there"),
        ((whole, KVMigration(part, 1, keeps_source=True)), (), "there, or arrive"),
        ((whole, KVMigration(part, HOST)), (), "are to be moved, and again or copied"),
        ((whole,), (Eviction(part),), "positions .* of it are to be used"),
        ((), (Eviction(away),), "is not there, or is read"),
        ((KVMigration(KVSegment("kv-9", range(4), 0), 1),), (), "kv-9, which is not live"),
    ]
    for migrations, evictions, message in refused:
        plan = IterationPlan(migrations=migrations, evictions=evictions)
        with pytest.raises(InvalidPlanError, match=message):
            cluster.state.commit(plan, cluster.snapshot())
    begin_move(cluster, whole)
    with pytest.raises(InvalidPlanError, match="there, or arrive"):
        cluster.state.commit(IterationPlan(migrations=(whole,)), cluster.snapshot())


def test_the_tokens_on_their_way_between_two_instances_are_bounded() -> None:
    cluster = PrefixCluster(2, 2 * MAX_MOVING_TOKENS)
    prompt = tuple(range(MAX_MOVING_TOKENS + 2))
    cluster.arrive("first", prompt)
    cluster.run_to_end("first")
    cluster.arrive("a", prompt)
    segment = KVSegment(owner(cluster).owner_id, range(MAX_MOVING_TOKENS + 1), 0)
    plan = IterationPlan(migrations=(KVMigration(segment, 1, keeps_source=True),))
    with pytest.raises(InvalidPlanError, match=f"{MAX_MOVING_TOKENS} can be at a time"):
        cluster.state.commit(plan, cluster.snapshot())
