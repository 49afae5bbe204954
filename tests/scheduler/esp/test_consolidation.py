"""Consolidation of KV not in flight: only with a gain, only where there is room, and nothing twice."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import CPU, DEAR, H200, H200_CAPACITY
from simulation import simulate, timed_request
from snapshots import decoding, snapshot_of, waiting

from loong.core.check_plan import check_plan
from loong.core.cost.cost_model import CostModel
from loong.core.plan import IterationPlan, KVMigration
from loong.core.request import SLO, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.planning_view import make_planning_view
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.esp.consolidation import KVConsolidation
from loong.scheduler.esp.planner import plan_esp


def consolidated(
    snapshot: Snapshot, cost_model: CostModel = H200, config: PolicyConfig | None = None
) -> tuple[KVMigration, ...]:
    """Return the consolidating moves of the instance set of instance 0."""
    found = make_planning_view(snapshot)
    instance_set = next(
        instance_set for instance_set in found.instance_sets if 0 in instance_set.instance_ids
    )
    return KVConsolidation(found, cost_model, config or PolicyConfig()).migrations(instance_set)


spread_views = st.lists(
    st.builds(
        lambda number, num_prompt, num_instances, max_tokens: decoding(
            f"r{number}", num_prompt, tuple(range(num_instances)), max_tokens
        ),
        st.integers(0, 10**6),
        st.integers(4, 50_000),
        st.integers(1, 4),
        st.integers(2, 5000),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda view: view.request_id,
)


@given(spread_views, st.sampled_from([CPU, H200, DEAR]), st.integers(0, 60_000))
def test_what_is_consolidated_is_all_of_one_request_on_an_instance_with_room(
    views: list[RequestView], cost_model: CostModel, num_free: int
) -> None:
    used = [sum(view.placement.tokens_by_instance()[i] for view in views) for i in range(4)]
    snapshot = snapshot_of([num_tokens + num_free for num_tokens in used], views)
    moves = consolidated(snapshot, cost_model)
    check_plan(snapshot, IterationPlan(migrations=moves))
    if moves:
        (request_id,) = {move.segment.owner_id for move in moves}
        (destination_id,) = {move.destination_id for move in moves}
        placement = snapshot.request[request_id].placement
        for move in moves:
            placement = placement.moving(move.segment, destination_id)
        assert placement.instance_ids == (destination_id,)


def test_it_goes_where_most_of_it_is() -> None:
    view = decoding("r", 1000, (0, 1), max_tokens=4000)
    whole = replace(view, placement=view.placement.moving(view.placement.segments[0], 1))
    assert consolidated(snapshot_of([9999] * 2, [whole])) == ()
    part = view.placement.segments[1]._replace(positions=range(1, 101, 2))
    mostly_0 = replace(view, placement=view.placement.moving(part, 0))
    assert {move.destination_id for move in consolidated(snapshot_of([9999] * 2, [mostly_0]))} == {0}


def test_one_that_soon_ends_is_not_worth_it() -> None:
    for max_tokens, expected in ((8, 0), (2000, 3)):
        view = decoding("r", 20_000, (0, 1, 2, 3), max_tokens)
        assert len(consolidated(snapshot_of([H200_CAPACITY] * 4, [view]))) == expected


def test_one_that_decodes_too_slowly_alone_stays_spread() -> None:
    view = decoding("r", 400_000, (0, 1, 2, 3), 50_000)
    for tpot, expected in ((0.02, 0), (0.2, 3)):
        snapshot = snapshot_of([H200_CAPACITY] * 4, [replace(view, slo=SLO(1.0, tpot))])
        assert len(consolidated(snapshot)) == expected


@pytest.mark.parametrize(("num_spared", "expected"), [(0, 0), (500 + 32, 1)])
def test_room_is_left_for_the_leases_of_all(num_spared: int, expected: int) -> None:
    view = decoding("r", 1000, (0, 1), max_tokens=4000)
    assert len(consolidated(snapshot_of([500 + num_spared] * 2, [view]))) == expected
    assert not consolidated(snapshot_of([500 + num_spared - 1] * 2, [view]))


def test_one_request_is_consolidated_at_a_time_and_the_rest_of_the_unit_decodes_on() -> None:
    views = [decoding("a", 1000, (0, 1), 4000), decoding("b", 1000, (0, 1), 4000)]
    plan = plan_esp(snapshot_of([H200_CAPACITY] * 2, views), H200, PolicyConfig())
    assert {move.segment.owner_id for move in plan.migrations} == {"a"}
    assert [batch.request_ids for batch in plan.batches] == [("b",)]


def test_a_prompt_that_was_spread_decodes_on_one_instance_afterwards() -> None:
    run = simulate("esp", [H200_CAPACITY] * 4, [timed_request(0, 100_000, 2000)], cost_model=H200)
    assert run.stats.num_migrated_tokens > 50_000
    last = [batch for _, plan in run.plans for batch in plan.batches][-1]
    assert last.group.dop == 1
    assert last.num_steps > 1


def test_nothing_moves_over_a_slow_link() -> None:
    slow = WorkCostModel(replace(H200.coefficients, moved_key=1e-3), overlap=1.0)
    run = simulate("esp", [H200_CAPACITY] * 4, [timed_request(0, 100_000, 500)], cost_model=slow)
    assert run.stats.num_migrated_tokens == 0


@given(
    st.integers(200, 4000),
    st.lists(st.integers(100, 6000), min_size=1, max_size=6),
    st.integers(300, 8000),
    st.sampled_from([0.01, 0.02, 0.1]),
)
def test_a_decode_whose_exchange_is_dear_is_consolidated_beside_prompts_within_what_room_there_is(
    num_held: int, lengths: list[int], num_free: int, exchange: float
) -> None:
    views = [decoding("tying", num_held, (0, 1), 4000), *(waiting(f"p{n}", k) for n, k in enumerate(lengths))]
    used = views[0].placement.tokens_by_instance()
    snapshot = snapshot_of([used[i] + num_free for i in (0, 1)], views)
    model = replace(H200, coefficients=replace(H200.coefficients, exchange=exchange))
    check_plan(snapshot, plan_esp(snapshot, model, PolicyConfig()))


def test_a_decode_is_consolidated_beside_prompts_only_where_its_exchange_is_dear() -> None:
    views = [decoding("tying", 5000, (0, 1), 400), waiting("prompt", 9000)]
    snapshot = snapshot_of([H200_CAPACITY] * 2, views)
    dear = replace(H200, coefficients=replace(H200.coefficients, exchange=0.05))
    assert not plan_esp(snapshot, H200, PolicyConfig()).migrations
    assert plan_esp(snapshot, dear, PolicyConfig()).migrations
