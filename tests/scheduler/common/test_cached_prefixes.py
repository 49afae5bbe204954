"""Requests that begin read cached KV as far as the rest of a plan leaves room for it."""

from plans import prefill
from shared_prefixes import PrefixCluster

from loong.core.check_plan import check_plan
from loong.core.placement import KVSegment
from loong.core.plan import IterationPlan, KVMigration, Transfer
from loong.core.request import FinishReason
from loong.scheduler.common.cached_prefixes import reading, with_borrowings

PROMPT = tuple(range(100, 120))


def test_a_request_begins_later_if_a_move_takes_the_room_of_what_it_would_read() -> None:
    for num_moved, begins in ((80, True), (81, False)):
        cluster = PrefixCluster(2, 100)
        cluster.arrive("first", PROMPT)
        running = cluster.begin("first", group=(1,))
        cluster.finish(running, token_id=0, finish_reason=FinishReason.STOP)
        cluster.arrive("moved", tuple(range(1000, 1000 + num_moved)))
        cluster.run("moved")
        cluster.arrive("new", (*PROMPT, 7))
        snapshot = reading(cluster.snapshot(), ((0, 1),))
        batch = prefill([snapshot.request["new"]], (0,), transfer=Transfer.QUERY)
        move = KVMigration(KVSegment("moved", range(num_moved), 0), 1)
        plan = with_borrowings(IterationPlan((batch,), (move,)), snapshot)
        assert [b.request_id for b in plan.borrowings] == (["new"] if begins else [])
        assert bool(plan.batches) == begins
        check_plan(snapshot, plan)
