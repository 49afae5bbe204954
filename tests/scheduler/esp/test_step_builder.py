"""Laws of a step builder: its predicted time is true, and within its budget, its tokens and its room."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from machines import CPU, DEAR, H200
from snapshots import begun, decoding, waiting

from loong.core.cost.cost_model import CostModel
from loong.core.cost.work import step_work
from loong.core.placement import Placement
from loong.core.plan import BatchPlan, Transfer
from loong.core.positions import is_partition
from loong.core.request import RequestId, RequestView
from loong.scheduler.common.masters import choose_masters
from loong.scheduler.common.striping import striped_part
from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel
from loong.scheduler.esp.chunk_size import LEAST_TOKENS, ChunkSizer, largest_within
from loong.scheduler.esp.step_builder import StepBuilder
from loong.scheduler.tuning import MIN_CHUNK_SHARE

MODELS = {"cpu": CPU, "h200": H200, "dear": DEAR}
UNLIMITED = 1 << 40


def step_on(
    dop: int,
    cost_model: CostModel,
    *,
    free: Sequence[int] | None = None,
    max_tokens: int = UNLIMITED,
    num_steps: int = 1,
) -> StepBuilder:
    slots = dict(enumerate([UNLIMITED] * dop if free is None else free))
    return StepBuilder(tuple(range(dop)), slots, cost_model, max_tokens, num_steps)


def add_whole(
    step: StepBuilder, view: RequestView, master_id: int, budget: float, min_tokens: int = 0
) -> int:
    return step.add(view, step.sizer.whole(view, master_id, budget, min_tokens))


def add_striped(step: StepBuilder, view: RequestView, budget: float, min_tokens: int = 0) -> int:
    return step.add(view, step.striped(view, budget, step.instance_ids, min_tokens))


def seconds_of(batch: BatchPlan, views: Sequence[RequestView], cost_model: CostModel) -> float:
    """By the definition: the counts of the batch, timed."""
    return cost_model.step_time(step_work(batch, {view.request_id: view.placement for view in views}))


@dataclass(frozen=True)
class Filled:
    """A step, the requests that were added, and what was added of each."""

    step: StepBuilder
    views: dict[RequestId, RequestView]
    num_added: dict[RequestId, int]


@st.composite
def filled_steps(draw: st.DrawFn) -> Filled:
    """Return any mix of decodes and prompts on one to five instances with much or little room."""
    dop = draw(st.integers(1, 5))
    ids = st.lists(st.integers(0, dop - 1), min_size=1, unique=True).map(tuple)
    free = draw(st.lists(st.sampled_from([0, 7, 300, UNLIMITED]), min_size=dop, max_size=dop))
    max_tokens = draw(st.sampled_from([1, 40, UNLIMITED]))
    step = step_on(dop, draw(st.sampled_from(list(MODELS.values()))), free=free, max_tokens=max_tokens)
    views, num_added = {}, {}
    for number in range(draw(st.integers(0, 3))):
        view = decoding(f"d{number}", draw(st.integers(1, 5000)), draw(ids))
        master_id = draw(st.integers(0, dop - 1))
        if step.free[master_id]:
            step.add_decodes([(view, master_id)])
            views[view.request_id], num_added[view.request_id] = view, 1
    budget = draw(st.floats(1e-3, 0.5))
    for number in range(draw(st.integers(0, 3))):
        num_cached, num_new = draw(st.integers(0, 3000)), draw(st.integers(1, 20_000))
        view = begun(f"p{number}", num_cached + num_new, num_cached, draw(ids))
        min_tokens = draw(st.sampled_from([0, 0, 16]))
        if dop > 1 and (len(view.placement.instance_ids) > 1 or draw(st.booleans())):
            count = add_striped(step, view, budget, min_tokens)
        else:
            home = view.placement.instance_ids or (0,)
            count = add_whole(step, view, home[0], budget, min_tokens)
        if count:
            views[view.request_id], num_added[view.request_id] = view, count
    return Filled(step, views, num_added)


@examples(30, thorough=600)
@given(filled_steps())
def test_what_a_step_predicts_is_the_time_of_its_batch(filled: Filled) -> None:
    if filled.views:
        batch = filled.step.plan()
        expected = seconds_of(batch, list(filled.views.values()), filled.step.cost_model)
        assert batch.predicted_time == pytest.approx(expected, rel=1e-12)


@examples(20, thorough=400)
@given(filled_steps())
def test_what_is_added_is_computed_once_and_stored_once_where_there_is_room(filled: Filled) -> None:
    assert all(slots >= 0 for slots in filled.step.free.values())
    if filled.views:
        batch = filled.step.plan()
        for request_id, view in filled.views.items():
            chunk = range(view.num_computed_tokens, view.num_computed_tokens + filled.num_added[request_id])
            assert is_partition((block.positions for block in batch.blocks_of(request_id)), chunk)
            assert is_partition((segment.positions for segment in batch.writes_of(request_id)), chunk)
            assert set(view.placement.instance_ids) <= set(batch.group.instance_ids)


@given(
    st.floats(0, 1),
    st.floats(1e-9, 1e-2),
    st.floats(0, 1e-6),
    st.floats(0, 1),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.floats(0, 2),
)
def test_the_largest_chunk_is_in_time_and_the_next_size_is_late_or_what_is_left_is_little(
    fixed: float, slope: float, square: float, jump: float, limit: int, most: int, budget: float
) -> None:
    """The time of a step grows with its tokens, and jumps where it leaves a CUDA graph."""

    def seconds(num_tokens: int) -> float:
        return fixed + slope * num_tokens + square * num_tokens**2 + jump * (num_tokens > limit)

    num_tokens = largest_within(seconds, most, budget)
    assert 0 <= num_tokens <= most
    if num_tokens:
        assert seconds(num_tokens) <= budget
        nearly = seconds(num_tokens) >= (1 - 0.15) * budget
        assert num_tokens == most or nearly or seconds(num_tokens + 1 + num_tokens // 4) > budget
    elif most:
        assert seconds(min(LEAST_TOKENS, most)) > budget


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@examples(15, thorough=300)
@given(data=st.data())
def test_chunks_fill_the_time_they_are_given_and_no_more(model: CostModel, data: st.DataObject) -> None:
    dop = data.draw(st.integers(1, 8))
    num_cached = data.draw(st.integers(0, 100_000))
    budget = data.draw(st.floats(0.05, 0.3)) + model.prefill_terms(dop).overhead
    held = tuple(range(data.draw(st.integers(1, dop))))
    view = begun("p", 10**7, num_cached, held)
    step = step_on(dop, model, free=[10**6] * dop)
    count = add_striped(step, view, budget) if dop > 1 else add_whole(step, view, 0, budget)
    if not count:
        return
    assert step.seconds <= budget
    bigger = step_on(dop, model, free=[10**6] * dop)
    more = count + count // 8 + 2 * dop
    part = ChunkSizer(bigger.ring, bigger.free, bigger.count, model, UNLIMITED)
    later = min(
        part.seconds_with(view, striped_part(view, more, bigger.ring, transfer)) for transfer in Transfer
    )
    assert step.seconds >= 0.85 * budget or later > budget


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_full_step_takes_no_more_chunks(model: CostModel) -> None:
    step, budget = step_on(1, model), 0.1
    assert not step.is_full(budget)
    assert add_whole(step, waiting("a", 10**6), 0, budget) > 0
    assert step.is_full(budget)
    assert add_whole(step, waiting("b", 10**6), 0, budget) == 0
    assert step.seconds > (1 - 2 * MIN_CHUNK_SHARE) * budget


def test_decodes_leave_less_time_for_prompts() -> None:
    counts = []
    for num_decodes in (0, 100, 200):
        step = step_on(1, H200)
        for number in range(num_decodes):
            step.add_decodes([(decoding(f"d{number}", 10_000, (0,)), 0)])
        counts.append(add_whole(step, waiting("p", 10**6), 0, budget=0.1))
    assert counts[0] > counts[1] > counts[2] > 0


def test_an_instance_computes_at_most_its_tokens() -> None:
    alone = step_on(1, H200, max_tokens=100)
    assert [add_whole(alone, waiting(name, 60), 0, budget=1.0) for name in "abc"] == [60, 40, 0]
    together = step_on(4, H200, max_tokens=100)
    assert add_striped(together, waiting("p", 10**6), budget=1.0) <= 400


def test_least_tokens_are_computed_whatever_they_take_but_only_where_there_is_room() -> None:
    view, budget = begun("p", 10**6, 10**5, (0,)), 1e-4
    for min_tokens, free, expected in ((0, 100, 0), (16, 100, 16), (16, 9, 9), (16, 0, 0)):
        step = step_on(1, H200, free=[free])
        assert add_whole(step, view, 0, budget, min_tokens) == expected


def test_a_long_prompt_keeps_to_a_handful_of_ranges_over_many_chunks() -> None:
    placement, num_chunks = Placement(), 0
    while placement.num_tokens < 400_000:
        view = RequestView("p", 10**6, 0, 16, 0.0, None, placement)
        step = step_on(4, H200, free=[10**6] * 4)
        assert add_striped(step, view, budget=0.1) > 0
        placement = placement.adding(step.plan().writes)
        num_chunks += 1
    assert num_chunks > 40
    assert len(placement.segments) <= 8


def test_a_last_chunk_stays_where_it_is_made() -> None:
    step = step_on(4, H200, free=[2500] * 4)
    assert add_striped(step, waiting("p", 8000), budget=0.3) == 8000
    assert step.plan().num_stored_tokens == dict.fromkeys(range(4), 2000)


def test_who_has_no_room_is_left_out_and_the_others_keep_stripes_that_the_next_chunk_goes_on_with() -> None:
    placement, free = Placement(), [0, 10**6, 9, 10**6]
    for _ in range(20):
        view = RequestView("p", 10**6, 0, 16, 0.0, None, placement)
        step = step_on(4, H200, free=free)
        assert add_striped(step, view, budget=0.1) > 0
        placement = placement.adding(step.plan().writes)
    assert placement.instance_ids == (1, 3)
    assert len(placement.segments) == 2


@pytest.mark.parametrize("num_full", [1, 3, 7])
def test_the_full_instances_of_a_long_history_attend_and_the_others_compute_as_fast_as_that_lets(
    num_full: int,
) -> None:
    counts, view = [], begun("p", 10**6, 400_000, tuple(range(8)))
    for free in ([10**6] * 8, [0] * num_full + [10**6] * (8 - num_full)):
        step = step_on(8, H200, free=free)
        counts.append(add_striped(step, view, budget=0.1))
        assert 0.06 <= step.seconds <= 0.105
    batch = step.plan()
    assert {block.master_id for block in batch.queries} == set(range(num_full, 8))
    assert batch.group.instance_ids == tuple(range(8))
    assert counts[1] > counts[0] / 2


def test_a_full_instance_to_which_attention_costs_nothing_bounds_no_chunk() -> None:
    free = WorkCostModel(Coefficients(pair=0.0))
    step = step_on(3, free, free=[2852, 2753, 0])
    assert add_striped(step, begun("p", 10**6, 900, (0, 1, 2)), budget=0.1) > 0


def test_stripes_that_do_not_fit_where_they_are_made_are_kept_in_proportion_to_room() -> None:
    step = step_on(4, H200, free=[0, 1000, 3000, 8000])
    assert add_striped(step, begun("p", 10**6, 9, (0, 1)), budget=0.3) == 12_000
    assert step.plan().num_stored_tokens == {1: 1000, 2: 3000, 3: 8000}
    assert not any(step.free.values())


def test_kv_travels_for_many_queries_and_queries_travel_to_long_histories() -> None:
    for num_cached, transfer in ((0, Transfer.KV), (600_000, Transfer.QUERY)):
        step = step_on(2, CPU, free=[10**6] * 2)
        view = begun("p", 10**7, num_cached, (0, 1)) if num_cached else waiting("p", 10**7)
        add_striped(step, view, budget=0.5)
        assert {block.transfer for block in step.plan().queries} == {transfer}


def test_no_room_at_all_adds_nothing() -> None:
    step = step_on(2, H200, free=[0, 0])
    assert add_striped(step, waiting("p", 100), budget=1.0) == 0
    assert step.shares == []


@pytest.mark.parametrize("dop", [2, 8, 32])
@pytest.mark.parametrize("free", [10_000, 3])
def test_a_prompt_goes_on_even_if_the_ring_alone_takes_more_than_the_step_has(dop: int, free: int) -> None:
    step = step_on(dop, CPU, free=[free] + [10_000] * (dop - 1))
    view = begun("p", 10**6, 500_000, tuple(range(dop)))
    assert add_striped(step, view, budget=1e-3, min_tokens=16) == 16


def test_a_group_is_those_who_have_a_part() -> None:
    step = step_on(4, H200)
    step.add_decodes([(decoding("a", 100, (1, 3)), 3)])
    assert step.plan().group.instance_ids == (1, 3)


def test_a_lease_is_predicted_by_the_steps_that_follow_and_keeps_slots_for_all() -> None:
    views = [decoding("a", 100, (0,), max_tokens=50), decoding("b", 100, (0, 1), max_tokens=4)]
    step = step_on(2, DEAR, free=[100, 100], num_steps=16)
    for view in views:
        step.add_decodes([(view, 0)])
    batch = step.plan()
    assert batch.num_steps == 16
    assert batch.num_stored_tokens == {0: 16 + 3}
    assert step.free == {0: 81, 1: 100}
    work = step_work(batch, {view.request_id: view.placement for view in views}, is_first=False)
    assert batch.predicted_time == DEAR.step_time(work)


decoding_views = st.lists(
    st.builds(
        lambda num_prompt, ids, max_tokens: decoding("r", num_prompt, tuple(ids), max_tokens),
        st.integers(1, 100),
        st.lists(st.integers(0, 3), min_size=1, unique=True),
        st.integers(2, 40),
    ),
    max_size=12,
)


@given(decoding_views, st.lists(st.integers(0, 60), min_size=4, max_size=4), st.integers(1, 16))
def test_masters_have_room_for_all_their_tokens(
    views: list[RequestView], room: list[int], num_steps: int
) -> None:
    masters = choose_masters(views, dict(enumerate(room)), num_steps)
    if masters is None:
        assert sum(min(num_steps, view.num_remaining_tokens) for view in views) > sum(room) - 4 * num_steps
        return
    assert [view for view, _ in masters] == views
    for view, master_id in masters:
        room[master_id] -= min(num_steps, view.num_remaining_tokens)
    assert min(room) >= 0


@given(st.integers(0, 100), st.integers(1, 16))
def test_one_instance_is_master_of_all_or_there_is_no_room(room: int, num_steps: int) -> None:
    views = [decoding(f"r{n}", 10, (7,), max_tokens=2 + n) for n in range(6)]
    num_tokens = sum(min(num_steps, view.num_remaining_tokens) for view in views)
    masters = choose_masters(views, {7: room}, num_steps)
    assert masters == ([(view, 7) for view in views] if num_tokens <= room else None)


def test_masters_hold_kv_of_their_requests_and_share_them_evenly() -> None:
    spread = [decoding(f"s{n}", 10, (0, 1)) for n in range(6)]
    masters = [master_id for _, master_id in choose_masters(spread, {0: 500, 1: 100, 2: 900}, 16) or ()]
    assert sorted(masters) == [0, 0, 0, 1, 1, 1]


def test_who_has_no_room_where_its_kv_is_has_another_master() -> None:
    views = [decoding("a", 10, (0,)), decoding("b", 10, (0,))]
    masters = choose_masters(views, {0: 20, 1: 100, 2: 50}, 15)
    assert masters == [(views[0], 0), (views[1], 1)]
