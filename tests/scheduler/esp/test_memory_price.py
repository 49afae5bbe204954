"""KV of decodes is on memory instances where they make more tokens with it there."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import H200
from simulation import Run, simulate, timed_request, with_memory
from snapshots import decoding, running, snapshot_of

from loong.core.cost.work import step_work
from loong.core.placement import KVSegment, Placement
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import RunningBatch, Snapshot
from loong.scheduler.common.leases import plan_lease
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import MemoryReaders, WorkCostModel
from loong.scheduler.esp.memory_price import LeasePrice, shared_out

PRICED = replace(H200, memory=MemoryReaders(1))
DISTANT = replace(PRICED, coefficients=replace(H200.coefficients, sent_query=1e-3))
CHATS = [timed_request(i, 4000, 300, 0.001 * i) for i in range(24)]
SHORT, LARGE = [40_000], [300_000, 300_000]


def lease_of(views: list[RequestView]) -> tuple[RunningBatch, Snapshot]:
    """Return a lease of these decodes on instance 0, and the snapshot in which it runs."""
    plan = plan_lease({0: 10**6}, views, PRICED, 16)
    assert plan is not None
    batch = running(1, plan)
    snapshot = snapshot_of([10**6], views, [batch])
    return batch, replace(snapshot, instances=with_memory(snapshot.instances, [10**6] * 2))


@given(st.lists(st.integers(16, 60_000), min_size=1, max_size=12), st.data())
def test_the_price_of_moves_is_that_of_steps_with_the_kv_there(
    lengths: list[int], data: st.DataObject
) -> None:
    views = [decoding(f"r{n}", length, (0,), max_tokens=500) for n, length in enumerate(lengths)]
    batch, snapshot = lease_of(views)
    price = LeasePrice(batch, snapshot, PRICED, PolicyConfig())
    number = data.draw(st.integers(0, len(views)))
    moves = list(shared_out(price.views[:number], 0, {1: 10**6, 2: 10**6}))
    placements: dict[RequestId, Placement] = {view.request_id: view.placement for view in price.views}
    for move in moves:
        found, first = placements[move.view.request_id], 0
        for instance_id, num_tokens in move.shares:
            segment = KVSegment(move.view.request_id, range(first, first + num_tokens), 0)
            found, first = found.moving(segment, instance_id), first + num_tokens
        placements[move.view.request_id] = found
    work = step_work(batch.plan, placements, is_first=False)
    work = replace(work, idle_holder_ids=frozenset({1, 2}))
    assert price.seconds_after(moves) == pytest.approx(PRICED.step_time(work))


def best_number(lengths: list[int], cost_model: WorkCostModel, max_tokens: int = 500) -> int:
    """Return the requests of a lease whose KV is to move, the longest first, where nobody waits."""
    views = [decoding(f"r{n}", length, (0,), max_tokens=max_tokens) for n, length in enumerate(lengths)]
    batch, snapshot = lease_of(views)
    price = LeasePrice(batch, snapshot, cost_model, PolicyConfig())
    found = price.best(list(shared_out(price.views, 0, {1: 10**6, 2: 10**6})))
    return 0 if found is None else len(found.moves)


def test_long_contexts_are_divided_and_short_ones_stay_where_room_is_ample() -> None:
    assert 0 < best_number([30_000] * 16, PRICED) < 16
    assert best_number([200] * 16, PRICED) == 0


def test_kv_stays_for_answers_that_end_before_a_move_pays_and_where_queries_take_long() -> None:
    assert best_number([30_000] * 16, PRICED, max_tokens=3) == 0
    assert best_number([30_000] * 16, DISTANT) == 0


def run_of(name: str, pools: list[int], cost_model: WorkCostModel = PRICED) -> Run:
    run = simulate(name, pools, CHATS, cost_model=cost_model, memory=LARGE)
    assert {len(tokens) for tokens in run.tokens.values()} == {300}
    assert run.stats.num_preemptions == 0
    return run


def test_requests_that_wait_for_room_end_sooner_with_kv_on_memory_instances() -> None:
    found, without = run_of("esp", SHORT), run_of("esp-no-memory", SHORT)
    assert found.stats.num_served_tokens > 0
    assert without.stats.num_served_tokens == without.stats.num_migrated_tokens == 0
    assert found.ended_at < without.ended_at


def test_nothing_moves_where_it_does_not_pay() -> None:
    for pools, cost_model in ((SHORT, DISTANT), ([400_000], PRICED)):
        found, without = run_of("esp", pools, cost_model), run_of("esp-no-memory", pools, cost_model)
        assert found.stats.num_migrated_tokens == found.stats.num_served_tokens == 0
        assert found.ended_at == without.ended_at


def test_kv_comes_back_once_nobody_waits_and_reading_it_at_home_is_faster() -> None:
    first = [timed_request(i, 4000, 3000 if i == 0 else 200, 0.001 * i) for i in range(16)]
    run = simulate("esp", SHORT, first, cost_model=PRICED, memory=LARGE)
    moves = [move for _, plan in run.plans for move in plan.migrations]
    to_memory = [move for move in moves if move.destination_id in (1, 2)]
    assert run.stats.num_memory_tokens == sum(len(move.segment.positions) for move in to_memory) > 0
    assert any(move.segment.instance_id in (1, 2) and move.destination_id == 0 for move in moves)
