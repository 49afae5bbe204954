from collections.abc import Collection
from dataclasses import replace

import pytest
from chaotic_batches import chaotic_batches
from hypothesis import given
from hypothesis import strategies as st

from loong.core.cost.cost_model import PrefillTerms, prefill_time
from loong.core.cost.work import InstanceWork, step_work
from loong.core.instance import ESPGroup
from loong.core.placement import KVSegment, Placement, striped
from loong.core.plan import BatchPlan, Transfer
from loong.core.request import RequestView
from loong.scheduler.common.striping import batch_of, decode_part, striped_part, whole_part
from loong.scheduler.cost.cost_model import Coefficients, ServiceLane, WindowReads, WorkCostModel

MODEL = WorkCostModel(Coefficients(exchange=2e-3, weights=5e-3))


def decoding_view(request_id: str, num_cached: int, instance_ids: tuple[int, ...] = (0,)) -> RequestView:
    placement = striped(request_id, range(num_cached), instance_ids)
    return RequestView(request_id, num_cached, 1, 10, 0.0, None, placement)


def seconds(batch: BatchPlan, *views: RequestView, model: WorkCostModel = MODEL) -> float:
    return model.step_time(step_work(batch, {view.request_id: view.placement for view in views}))


@given(
    dop=st.integers(1, 8),
    stripe=st.integers(2, 500),
    cached_stripe=st.integers(0, 500),
    overlap=st.sampled_from((0.0, 0.5, 1.0)),
)
def test_the_closed_form_of_a_chunk_is_the_time_of_its_batch(
    dop: int, stripe: int, cached_stripe: int, overlap: float
) -> None:
    group = ESPGroup(tuple(range(dop)))
    num_new, num_cached = stripe * dop, cached_stripe * dop
    placement = striped("r", range(num_cached), group.instance_ids) if num_cached else Placement()
    view = RequestView("r", num_new + num_cached, 0, 1, 0.0, None, placement)
    batch = batch_of(group, [striped_part(view, num_new, group, Transfer.QUERY)])
    each = {"batch": 1e-3, "sent_request": 1e-4, "exchange": 2e-3, "attend": 3e-4, "part_pair": 3e-9}
    launches = {
        "launch": 3e-3,
        "mixed": 1.0,
        "exchange_launch": 9e-3,
        "ring_launch": 2e-3,
        "hop_launch": 5e-4,
    }
    free = {"key": 0.0, "sent_query": 0.0}  # computing binds, and launching
    model = WorkCostModel(Coefficients(**each, **launches, **free), overlap)
    # The closed form counts half a key too few for each query.
    assert seconds(batch, view, model=model) == pytest.approx(
        prefill_time(model, num_new, num_cached, dop), rel=1e-3, abs=2e-8 * num_new
    )


@pytest.mark.parametrize(("dop", "expected"), [(1, 3e-3), (2, 3e-3 + 9e-3), (4, 3e-3 + 4e-3 + 3 * 5e-3)])
def test_the_closed_form_launches_a_ring_where_that_is_more_than_an_exchange(
    dop: int, expected: float
) -> None:
    launches = {"launch": 3e-3, "exchange_launch": 9e-3, "ring_launch": 4e-3, "hop_launch": 5e-3}
    assert WorkCostModel(Coefficients(**launches), overlap=1.0).prefill_terms(dop).launch == pytest.approx(
        expected
    )


@given(
    st.builds(
        PrefillTerms,
        *[st.floats(1e-6, 1e-2)] * 2,
        *[st.floats(1e-9, 1e-4)] * 2,
        st.floats(0, 1e-6),
        launch=st.floats(0, 1e-1),
    ),
    st.floats(0, 10),
    st.integers(0, 10**6),
)
def test_a_chunk_sized_to_a_time_fits_it(terms: PrefillTerms, budget: float, num_cached: int) -> None:
    num_tokens = terms.max_tokens(budget, num_cached)
    if num_tokens:
        assert terms.time(num_tokens, num_tokens * num_cached, num_tokens**2) <= budget * (1 + 1e-9)


def test_a_step_with_one_token_takes_the_weights_and_with_many_their_computing() -> None:
    terms = PrefillTerms(overhead=0.0, floor=1.0, per_token=0.1, per_cached_pair=0.0, per_new_pair=0.0)
    assert terms.time(1, 0, 1) == pytest.approx(1.0, rel=1e-2)
    assert terms.time(1000, 0, 10**6) == pytest.approx(100.0, rel=1e-2)


def test_the_time_of_a_chunk_is_quadratic_in_its_length_and_linear_in_what_is_cached() -> None:
    short, middle, long = (prefill_time(MODEL, n, 0, 2) for n in (1000, 2000, 3000))
    assert long - middle > middle - short
    near, further, far = (prefill_time(MODEL, 1000, c, 2) for c in (1000, 2000, 3000))
    assert far - further == pytest.approx(further - near)


def test_a_long_prompt_gains_from_more_instances_and_a_short_one_does_not() -> None:
    assert prefill_time(MODEL, 16000, 0, 4) < prefill_time(MODEL, 16000, 0, 1) / 2
    assert prefill_time(MODEL, 8, 0, 4) > prefill_time(MODEL, 8, 0, 1)


def test_a_decode_step_waits_for_its_busiest_instance() -> None:
    a, b = decoding_view("a", 4000, (0,)), decoding_view("b", 4000, (1,))
    group = ESPGroup((0, 1))
    apart = batch_of(group, [decode_part(a, 0), decode_part(b, 1)])
    alone = batch_of(group, [decode_part(a, 0)])
    assert seconds(apart, a, b) == pytest.approx(seconds(alone, a))
    together = batch_of(group, [decode_part(a, 0), decode_part(b, 0)])
    assert seconds(together, a, b) > seconds(apart, a, b)


def test_a_decode_step_spread_over_instances_reads_its_kv_faster() -> None:
    spread, whole = decoding_view("r", 400_000, (0, 1)), decoding_view("r", 400_000, (0,))
    on_two = batch_of(ESPGroup((0, 1)), [decode_part(spread, 0)])
    on_one = batch_of(ESPGroup((0,)), [decode_part(whole, 0)])
    assert seconds(on_two, spread) < seconds(on_one, whole)


@pytest.mark.parametrize("transfer", Transfer)
def test_only_what_travels_costs_transfer(transfer: Transfer) -> None:
    view = RequestView("r", 3000, 0, 1, 0.0, None, striped("r", range(1000), (0, 1)))
    group = ESPGroup((0, 1))
    batch = batch_of(group, [striped_part(view, 2000, group, transfer)])
    dear = WorkCostModel(Coefficients(ring_key=1e-3, sent_query=1e-2))
    free = WorkCostModel(Coefficients(ring_key=0.0, sent_query=0.0))
    paid = seconds(batch, view, model=dear) - seconds(batch, view, model=free)
    assert paid == pytest.approx({Transfer.KV: 1.5, Transfer.QUERY: 10.0}[transfer])


def test_a_ring_hides_under_attention_as_far_as_they_overlap() -> None:
    view = RequestView("r", 3000, 0, 1, 0.0, None, Placement())
    group = ESPGroup((0, 1))
    batch = batch_of(group, [striped_part(view, 3000, group, Transfer.KV)])
    exposed, free = (Coefficients(ring_key=ring_key) for ring_key in (1e-6, 0.0))
    hidden = seconds(batch, view, model=WorkCostModel(exposed, overlap=1.0))
    assert hidden == pytest.approx(seconds(batch, view, model=WorkCostModel(free)))
    assert seconds(batch, view, model=WorkCostModel(exposed)) > hidden


def test_prompts_together_pay_for_the_step_once_and_for_each_of_them() -> None:
    terms = WorkCostModel(Coefficients(sent_request=1e-4, attend=3e-4)).prefill_terms(2)
    together, alone = terms.time(200, 0, 2 * 100**2, num_prompts=2), terms.time(100, 0, 100**2)
    assert 2 * alone - together == pytest.approx(terms.overhead)


def test_launching_hides_what_is_computed_meanwhile_as_far_as_they_overlap() -> None:
    def of(num_tokens: int, overlap: float) -> float:
        view = RequestView("p", num_tokens, 0, 1, 0.0, None, Placement())
        model = WorkCostModel(Coefficients(step=0.0, launch=10e-3, key=0.0), overlap)
        batch = batch_of(ESPGroup((0,)), [whole_part(view, num_tokens, 0)])
        return seconds(batch, view, model=model)

    assert of(2, overlap=1.0) == of(100, overlap=1.0) == pytest.approx(10e-3)
    alone = replace(MODEL, coefficients=Coefficients(step=0.0, key=0.0))
    assert of(4000, overlap=1.0) == pytest.approx(prefill_time(alone, 4000, 0, 1), rel=1e-3)
    assert of(500, overlap=0.0) > of(500, overlap=1.0)


@pytest.mark.parametrize(
    ("transfer", "launching"), [(Transfer.QUERY, 10e-3 + 20e-3), (Transfer.KV, 10e-3 + 5e-3 + 2 * 4e-3)]
)
def test_kernels_of_what_travels_are_launched_while_others_compute(
    transfer: Transfer, launching: float
) -> None:
    def of(num_tokens: int, model: WorkCostModel) -> float:
        view, group = RequestView("p", num_tokens, 0, 1, 0.0, None, Placement()), ESPGroup((0, 1, 2))
        batch = batch_of(group, [striped_part(view, num_tokens, group, transfer)])
        return seconds(batch, view, model=model)

    free = Coefficients(step=0.0, member=0.0, key=0.0, ring_key=0.0, sent_query=0.0)
    launched = replace(free, launch=10e-3, exchange_launch=20e-3, ring_launch=5e-3, hop_launch=4e-3)
    assert of(9, WorkCostModel(launched, overlap=1.0)) == pytest.approx(launching)
    assert of(9000, WorkCostModel(launched, overlap=1.0)) == of(9000, WorkCostModel(free))


def test_decodes_beside_a_prompt_launch_kernels_of_their_own() -> None:
    model = WorkCostModel(Coefficients(launch=10e-3, mixed=8e-3), overlap=1.0)
    prompt, decode = RequestView("p", 10, 0, 1, 0.0, None, Placement()), decoding_view("d", 10)
    shares = [whole_part(prompt, 10, 0), decode_part(decode, 0)]
    alone, beside = (batch_of(ESPGroup((0,)), shares[:n]) for n in (1, 2))
    both = seconds(beside, prompt, decode, model=model)
    assert both - seconds(alone, prompt, model=model) == pytest.approx(8e-3)


def test_prompts_and_decodes_of_one_step_cost_a_group_more() -> None:
    model = WorkCostModel(Coefficients(beside=1e-3, beside_group=4e-3))
    free = replace(model, coefficients=replace(model.coefficients, beside=0.0, beside_group=0.0))
    prompt, decode = RequestView("p", 10, 0, 1, 0.0, None, Placement()), decoding_view("d", 10)
    shares = [whole_part(prompt, 10, 0), decode_part(decode, 0)]

    def lost(group: ESPGroup, num_shares: int) -> float:
        batch = batch_of(group, shares[:num_shares])
        views = (prompt, decode)[:num_shares]
        return seconds(batch, *views, model=model) - seconds(batch, *views, model=free)

    assert lost(ESPGroup((0,)), 2) == pytest.approx(1e-3)
    assert lost(ESPGroup((0, 1)), 2) == pytest.approx(5e-3)
    assert lost(ESPGroup((0, 1)), 1) == 0.0


def test_a_batch_is_reported_once_and_a_lease_settles_at_every_step() -> None:
    views = [decoding_view(name, 100, (0, 1)) for name in "ab"]
    placements = {view.request_id: view.placement for view in views}
    lease = batch_of(ESPGroup((0, 1)), [decode_part(view, 0, 4) for view in views], 4)
    single = batch_of(ESPGroup((0, 1)), [decode_part(view, 0) for view in views])
    model = WorkCostModel(Coefficients(batch=1e-3, sent_request=1e-4, settle=1e-5))
    first, later = (model.step_time(step_work(lease, placements, is_first)) for is_first in (True, False))
    assert first - later == pytest.approx(1e-3 + 2 * 1e-4)
    assert first - model.step_time(step_work(single, placements)) == pytest.approx(1e-5)


def test_every_segment_of_kv_costs_time_on_every_instance() -> None:
    model = WorkCostModel(Coefficients(segment=1e-3))
    whole, torn = decoding_view("r", 100), decoding_view("r", 100)
    pieces = tuple(KVSegment("r", range(i, 100, 10), 0) for i in range(10))
    torn = replace(torn, placement=Placement(pieces))
    batches = [batch_of(ESPGroup((0,)), [decode_part(view, 0)]) for view in (whole, torn)]
    slower = seconds(batches[1], torn, model=model) - seconds(batches[0], whole, model=model)
    assert slower == pytest.approx(9e-3)


def test_a_migration_costs_a_message_and_its_tokens_on_the_link_it_takes() -> None:
    seconds = Coefficients(message=1.0, moved_key=0.1, offloaded_key=0.2)
    model = WorkCostModel(seconds, first_host_tier_id=2)
    assert model.migration_time(10, 0, 1) == pytest.approx(2.0)
    assert model.migration_time(10, 0, 2) == model.migration_time(10, 3, 1) == pytest.approx(3.0)


def served_decode(
    num_own: int, num_served: int, model: WorkCostModel = MODEL, idle_ids: Collection[int] = ()
) -> float:
    """Return the time of a decode on instance 0 of a request with tokens there and on instance 1."""
    segments = [KVSegment("r", range(num_own), 0)] if num_own else []
    segments += [KVSegment("r", range(num_own, num_own + num_served), 1)] if num_served else []
    placement = Placement(tuple(segments))
    view = RequestView("r", placement.num_tokens, 1, 10, 0.0, None, placement)
    batch = batch_of(ESPGroup((0,)), [decode_part(view, 0)])
    work = step_work(batch, {"r": placement})
    return model.step_time(replace(work, idle_holder_ids=frozenset(idle_ids)))


def test_kv_that_another_serves_takes_its_reading_and_an_exchange() -> None:
    terms = MODEL.coefficients
    exchange = terms.exchange + 2 * terms.sent_query
    reading = terms.decode_key * 50_000
    assert served_decode(0, 50_000) - served_decode(0, 0) == pytest.approx(exchange + reading, rel=1e-3)


def test_members_and_holders_attend_at_once() -> None:
    alone, both = served_decode(1, 50_000), served_decode(50_000, 50_000)
    assert both == pytest.approx(alone, rel=1e-3)
    assert served_decode(80_000, 50_000) - both == pytest.approx(
        30_000 * MODEL.coefficients.decode_key, rel=1e-2
    )


def test_a_busy_holder_answers_later_and_loses_the_time_of_what_it_reads() -> None:
    model = replace(MODEL, lane=ServiceLane(delay=0.003))
    reading = MODEL.coefficients.decode_key * 50_000
    assert served_decode(1, 50_000, model) == pytest.approx(served_decode(1, 50_000) + 0.003)
    assert served_decode(50_000, 0, model) == served_decode(50_000, 0)
    assert served_decode(1, 50_000, model, {1}) == served_decode(1, 50_000)
    work = InstanceWork(num_attends=1, num_decode_keys=50_000, num_sent_queries=1)
    assert model.served_time(work) == MODEL.served_time(work) == pytest.approx(reading)
    losing = replace(MODEL, lane=ServiceLane(loss=0.002))
    assert losing.served_time(work) == pytest.approx(reading + 0.002)


def test_a_lane_changes_nothing_where_no_instance_outside_a_group_holds_kv() -> None:
    laned = replace(MODEL, lane=ServiceLane(0.005))
    num_served = 0
    for batch, placements in chaotic_batches(range(6)):
        work = step_work(batch, placements)
        held = {i for placement in placements.values() for i in placement.instance_ids}
        assert work.holders.keys() >= held.difference(batch.group.instance_ids)
        if work.holders:
            num_served += 1
            assert laned.step_time(work) >= MODEL.step_time(work)
        else:
            assert laned.step_time(work) == MODEL.step_time(work)
    assert num_served


@pytest.mark.parametrize("factor", [0.3, 50.0])
def test_a_scaled_model_takes_as_many_times_as_long_for_everything(factor: float) -> None:
    scaled = MODEL.scaled(factor)
    for batch, placements in chaotic_batches(range(1)):
        work = step_work(batch, placements)
        assert scaled.step_time(work) == pytest.approx(factor * MODEL.step_time(work))
    assert scaled.migration_time(10, 0, 1) == pytest.approx(factor * MODEL.migration_time(10, 0, 1))
    assert prefill_time(scaled, 500, 100, 2) == pytest.approx(factor * prefill_time(MODEL, 500, 100, 2))


@pytest.mark.parametrize("group", [(0,), (0, 1)])
def test_layers_with_a_window_take_no_longer_beyond_it_and_others_as_ever(group: tuple[int, ...]) -> None:
    def lasts(model: WorkCostModel, num_cached: int, num_new: int) -> float:
        placement = striped("r", range(num_cached), group)
        view = RequestView("r", num_cached + num_new, 0, 1, 0.0, None, placement)
        part = striped_part(view, num_new, ESPGroup(group), Transfer.QUERY)
        return seconds(batch_of(ESPGroup(group), [part]), view, model=model)

    whole = replace(MODEL, coefficients=Coefficients(key=1e-8, decode_key=1e-7))
    windows, half = (replace(whole, windows=WindowReads(share, 64)) for share in (1.0, 0.5))
    for num_new in (1, 40):
        assert lasts(windows, 100_000, num_new) == pytest.approx(lasts(windows, 1000, num_new))
        assert lasts(windows, 40, num_new) <= lasts(whole, 40, num_new)
        each = [lasts(model, 10_000, num_new) for model in (windows, half, whole)]
        assert each[1] == pytest.approx((each[0] + each[2]) / 2, rel=1e-3)


def test_chunks_of_layers_with_a_window_are_linear_in_their_length() -> None:
    windows = replace(MODEL, windows=WindowReads(1.0, 64))
    terms, whole = windows.prefill_terms(2), MODEL.prefill_terms(2)
    assert terms.per_cached_pair == terms.per_new_pair == 0
    assert terms.per_token == pytest.approx(whole.per_token + 64 * whole.per_cached_pair)
