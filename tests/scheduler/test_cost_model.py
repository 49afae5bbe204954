from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.core.instance import ESPGroup
from loong.core.placement import Placement, striped
from loong.core.plan import Transfer
from loong.core.request import RequestView
from loong.scheduler.cost_model import LinearCostModel
from loong.scheduler.striping import batch_of, decode_share, striped_share

MODEL = LinearCostModel()


def decoding_view(request_id: str, num_cached: int, instance_ids: tuple[int, ...] = (0,)) -> RequestView:
    placement = striped(request_id, range(num_cached), instance_ids)
    return RequestView(request_id, num_cached, 1, 10, 0.0, None, placement)


@given(dop=st.integers(1, 8), stripe=st.integers(1, 500), cached_stripe=st.integers(0, 500))
def test_the_closed_form_of_a_chunk_is_the_time_of_its_batch(
    dop: int, stripe: int, cached_stripe: int
) -> None:
    group = ESPGroup(tuple(range(dop)))
    num_new, num_cached = stripe * dop, cached_stripe * dop
    placement = striped("r", range(num_cached), group.instance_ids) if num_cached else Placement()
    view = RequestView("r", num_new + num_cached, 0, 1, 0.0, None, placement)
    batch = batch_of(group, [striped_share(view, num_new, group, Transfer.KV)])
    assert MODEL.step_time(batch, {"r": placement}) == pytest.approx(
        MODEL.prefill_time(num_new, num_cached, dop)
    )


def test_the_time_of_a_chunk_is_quadratic_in_its_length_and_linear_in_what_is_cached() -> None:
    short, middle, long = (MODEL.prefill_time(n, 0, 2) for n in (1000, 2000, 3000))
    assert long - middle > middle - short
    near, further, far = (MODEL.prefill_time(1000, c, 2) for c in (1000, 2000, 3000))
    assert far - further == pytest.approx(further - near)


def test_a_long_prompt_gains_from_more_instances_and_a_short_one_does_not() -> None:
    assert MODEL.prefill_time(8000, 0, 4) < MODEL.prefill_time(8000, 0, 1) / 2
    assert MODEL.prefill_time(8, 0, 4) > MODEL.prefill_time(8, 0, 1)


def test_a_decode_step_waits_for_its_busiest_instance() -> None:
    a, b = decoding_view("a", 4000, (0,)), decoding_view("b", 4000, (1,))
    placements = {"a": a.placement, "b": b.placement}
    group = ESPGroup((0, 1))
    apart = batch_of(group, [decode_share(a, 0), decode_share(b, 1)])
    alone = batch_of(group, [decode_share(a, 0)])
    assert MODEL.step_time(apart, placements) == pytest.approx(MODEL.step_time(alone, placements))
    together = batch_of(group, [decode_share(a, 0), decode_share(b, 0)])
    assert MODEL.step_time(together, placements) > MODEL.step_time(apart, placements)


def test_a_decode_step_spread_over_instances_reads_its_kv_faster() -> None:
    spread, whole = decoding_view("r", 400_000, (0, 1)), decoding_view("r", 400_000, (0,))
    on_two = batch_of(ESPGroup((0, 1)), [decode_share(spread, 0)])
    on_one = batch_of(ESPGroup((0,)), [decode_share(whole, 0)])
    assert MODEL.step_time(on_two, {"r": spread.placement}) < MODEL.step_time(on_one, {"r": whole.placement})


@pytest.mark.parametrize("transfer", Transfer)
def test_only_what_travels_costs_transfer(transfer: Transfer) -> None:
    view = RequestView("r", 3000, 0, 1, 0.0, None, striped("r", range(1000), (0, 1)))
    group = ESPGroup((0, 1))
    batch = batch_of(group, [striped_share(view, 2000, group, transfer)])
    free_of_charge = replace(MODEL, transfer_time=0.0)
    placements = {"r": view.placement}
    paid = MODEL.step_time(batch, placements) - free_of_charge.step_time(batch, placements)
    num_sent = {Transfer.KV: 1000 + 500, Transfer.QUERY: 1000 * MODEL.num_queries_per_kv / 2}[transfer]
    assert paid == pytest.approx(num_sent * MODEL.transfer_time)


def test_a_migration_costs_a_message_and_its_tokens() -> None:
    assert MODEL.migration_time(0) == MODEL.transfer_overhead
    assert MODEL.migration_time(3000) - MODEL.migration_time(1000) == pytest.approx(
        2000 * MODEL.transfer_time
    )
