from hypothesis import given
from hypothesis import strategies as st

from loong.core.placement import Placement, striped
from loong.core.plan import Transfer
from loong.core.request import RequestView
from loong.scheduler.batching import choose_masters, chunk_share, chunk_sizes, keep_on_all, keep_on_fewest
from loong.scheduler.cost_model import WorkCostModel

MODEL = WorkCostModel()


def waiting_view(number: int, num_prompt: int) -> RequestView:
    return RequestView(f"r{number}", num_prompt, 0, 8, float(number), None, Placement())


def decoding_view(number: int, instance_ids: tuple[int, ...]) -> RequestView:
    request_id = f"r{number}"
    return RequestView(request_id, 4, 1, 100, 0.0, None, striped(request_id, range(4), instance_ids))


@given(st.lists(st.integers(1, 500), min_size=1, max_size=20), st.integers(1, 1000))
def test_chunks_use_the_budget_up_and_the_oldest_gets_its_half(lengths: list[int], budget: int) -> None:
    views = [waiting_view(number, length) for number, length in enumerate(lengths)]
    sizes = {view.request_id: num_tokens for view, num_tokens in chunk_sizes(views, budget)}
    assert sum(sizes.values()) == min(budget, sum(lengths))
    assert all(0 < sizes[v.request_id] <= v.num_prompt_tokens for v in views if v.request_id in sizes)
    assert sizes["r0"] >= min(lengths[0], budget / 2)


def test_short_prompts_are_not_held_up_by_a_long_one() -> None:
    sizes = chunk_sizes([waiting_view(0, 5000), waiting_view(1, 4000), waiting_view(2, 30)], 512)
    assert {view.request_id: n for view, n in sizes} == {"r0": 256, "r1": 226, "r2": 30}


def test_kv_stays_on_the_fewest_instances_that_have_room_for_all_of_it() -> None:
    view = waiting_view(0, 1000)
    assert keep_on_fewest(view, {0: 500, 1: 2000, 2: 900}, 8) == {1: 2000}
    assert keep_on_fewest(view, {0: 500, 1: 700, 2: 600}, 8) == {1: 700, 2: 600}
    assert keep_on_all(view, {0: 500, 1: 700}, 8) == {0: 500, 1: 700}


def test_kv_stays_with_the_kv_that_a_request_has() -> None:
    view = RequestView("r", 1000, 0, 8, 0.0, None, striped("r", range(512), (0,)))
    assert keep_on_fewest(view, {0: 600, 1: 2000}, 8) == {0: 600}


def test_masters_are_where_kv_is_and_evenly_loaded() -> None:
    masters = choose_masters([decoding_view(n, (0, 1)) for n in range(6)], {0: 99, 1: 99, 2: 99}, 16)
    assert masters is not None
    assert sorted(masters.values()) == [0, 0, 0, 1, 1, 1]


def test_a_master_without_room_is_passed_over() -> None:
    view = decoding_view(0, (0,))
    assert choose_masters([view], {0: 3, 1: 50}, 16) == {"r0": 1}
    assert choose_masters([view], {0: 3, 1: 5}, 16) is None


def test_queries_travel_once_they_are_less_than_kv() -> None:
    for num_cached, expected in ((50, Transfer.KV), (400, Transfer.QUERY)):
        view = RequestView("r", num_cached + 100, 0, 8, 0.0, None, striped("r", range(num_cached), (0, 1)))
        free = {0: 1000, 1: 1000}
        share = chunk_share(view, 100, free, free, MODEL)
        assert {block.transfer for block in share.queries} == {expected}


def test_a_long_chunk_is_striped_though_one_instance_keeps_it() -> None:
    view = waiting_view(0, 2000)
    share = chunk_share(view, 2000, {0: 9000, 1: 9000, 2: 9000}, {1: 9000}, MODEL)
    assert [block.master_id for block in share.queries] == [0, 1, 2]
    assert [(s.instance_id, s.positions) for s in share.writes] == [(1, range(2000))]


def test_stripes_that_do_not_fit_where_they_are_made_are_kept_by_others() -> None:
    view = waiting_view(0, 1000)
    free = {0: 900, 1: 100}
    share = chunk_share(view, 1000, free, free, MODEL)
    assert {s.instance_id: len(s.positions) for s in share.writes} == free
