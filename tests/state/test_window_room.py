"""As many requests may begin as layers with a window have room for, and KV with windows replaces other KV."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_prefixes import PrefixCluster
from simulation import instances_with, timed_request

from loong.core.events import MigrationFinished, RequestArrived
from loong.core.placement import OwnerView
from loong.core.plan import Borrowing, Eviction, Failure, IterationPlan, KVMigration, Preemption
from loong.core.window_memory import WindowMemory
from loong.state.cluster_state import ClusterState

WINDOW = 8


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=30), st.integers(1, 5)
)
def test_all_may_begin_that_have_room_together_in_order(lengths: list[tuple[int, int]], number: int) -> None:
    memory = WindowMemory.of(WINDOW, 2 * WINDOW * number + 2, 1)
    state = ClusterState(instances_with([10_000]), windows=memory)
    for index, (num_prompt, max_tokens) in enumerate(lengths):
        state.apply(RequestArrived(0.0, timed_request(index, num_prompt, max_tokens)))
    snapshot = state.snapshot(0.0)
    held = [memory.num_held(sum(pair)) for pair in lengths]
    num_shown = len(snapshot.waiting)
    assert sum(held[:num_shown]) <= memory.room_of_requests
    assert num_shown == len(held) or sum(held[: num_shown + 1]) > memory.room_of_requests
    assert num_shown >= min(number, len(held))
    assert len(snapshot.following) == len(held) - num_shown


PROMPT = tuple(range(100, 140))


def windowless_cluster() -> tuple[PrefixCluster, OwnerView]:
    """Return two instances, and KV that nobody reads: on instance 1, without windows but at its end.

    A request has computed the same prompt on instance 0, with all windows.
    """
    cluster = PrefixCluster(2, 100)
    cluster.state = ClusterState(
        cluster.snapshot().instances, keeps_prefixes=True, windows=WindowMemory.of(4, 90, 20)
    )
    cluster.arrive("first", PROMPT)
    cluster.run_to_end("first")
    cluster.arrive("second", PROMPT)
    (owner,) = cluster.snapshot().owners.values()
    cluster.state.commit(
        IterationPlan(migrations=(KVMigration(owner.unread.segments[0], 1),)), cluster.snapshot()
    )
    cluster.state.apply(MigrationFinished(next(cluster.times), cluster.state.last_id, is_committed=True))
    cluster.finish(cluster.begin_with(cluster.view("second"), Borrowing("second", ()), (0,)))
    (owner,) = cluster.snapshot().owners.values()
    assert {s.instance_id for s in owner.unread.segments} == {1}
    return cluster, owner


@pytest.mark.parametrize(
    "plan",
    [
        IterationPlan(preemptions=(Preemption("second"),)),
        IterationPlan(failures=(Failure("second", "has no room"),)),
    ],
    ids=["preempted", "failed"],
)
@pytest.mark.parametrize("is_copied", [False, True])
def test_kv_that_a_plan_uses_is_there_though_a_request_leaves_better_kv(
    plan: IterationPlan, is_copied: bool
) -> None:
    cluster, owner = windowless_cluster()
    segment = owner.unread.segments[0]
    if is_copied:
        plan = replace(plan, migrations=(KVMigration(segment, 0, keeps_source=True),))
    else:
        plan = replace(plan, evictions=(Eviction(segment),))
    cluster.state.commit(plan, cluster.snapshot())
    cluster.arrive("third", PROMPT)
    held = {i for o in cluster.snapshot().owners.values() for i in o.placement.instance_ids}
    assert held >= ({1} if is_copied else {0})
