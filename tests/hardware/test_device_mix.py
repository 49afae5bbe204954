import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.hardware.device_mix import (
    Demand,
    Mix,
    Offer,
    OfferedDevice,
    least_bandwidth,
    offers,
    traveling_bytes,
)
from loong.scheduler.cost.roofline import ModelShape

MHA = ModelShape(40, 5120, 40, 40, 128, 12_700_000_000, 164_000_000)  # LLaMA-13B
GQA = ModelShape(32, 4096, 32, 8, 128, 7_000_000_000, 525_000_000)
BIG = OfferedDevice("big", 17_500.0, 80e9, 1.5e12, 200e12, 25e9, 33e-6, 300e9, 10e-6)
SMALL = OfferedDevice("small", 1_600.0, 24e9, 0.75e12, 0.0, 25e9, 33e-6, 25e9, 10e-6)
CHATS = Demand(256.0, 256.0, 0.05)


def test_what_travels_is_four_hidden_states_a_layer_without_shared_heads() -> None:
    """Lamina, 4.2: 4 e d B L bytes, in 2 N B / (MFU F) seconds."""
    assert traveling_bytes(MHA) == 4 * 2 * 5120 * 40
    assert traveling_bytes(GQA) == 32 * 2 * (2 * 4096 + 2 * 1024)
    num_parameters, peak, mfu, batch_size = 13e9, 312e12, 0.249, 128
    seconds = 2 * num_parameters * batch_size / (mfu * peak)
    formula = 2 * 2 * 5120 * 40 * mfu * peak / num_parameters
    assert least_bandwidth(MHA, batch_size, seconds) == pytest.approx(formula)
    assert formula == pytest.approx(4.90e9, rel=0.01)  # its table 3, at the MFU that follows from it


@given(
    shape=st.sampled_from([MHA, GQA]),
    num_computing=st.sampled_from([1, 2, 4, 8]),
    num_memory=st.integers(0, 16),
    num_parts=st.sampled_from([1, 2]),
    num_prompt_tokens=st.integers(1, 50_000),
    num_output_tokens=st.integers(1, 2_000),
    tpot=st.floats(0.01, 1.0),
)
def test_an_offer_has_the_largest_batch_with_room_and_time(
    shape: ModelShape,
    num_computing: int,
    num_memory: int,
    num_parts: int,
    num_prompt_tokens: int,
    num_output_tokens: int,
    tpot: float,
) -> None:
    demand = Demand(num_prompt_tokens, num_output_tokens, tpot)
    mix = Mix(BIG, num_computing, SMALL, num_memory, num_parts) if num_memory else Mix(BIG, num_computing)
    offer = Offer(shape, demand, mix)
    size = offer.batch_size
    stored = size * (num_prompt_tokens + num_output_tokens) * shape.kv_bytes
    assert stored <= (num_memory * SMALL.memory_bytes or num_computing * BIG.memory_bytes)
    if size:
        assert offer.step_time(size) <= tpot
        assert offer.output_rate == size / offer.step_time(size)
    one_more = stored + stored / size if size else (num_prompt_tokens + num_output_tokens) * shape.kv_bytes
    has_room = one_more < 0.89 * (num_memory * SMALL.memory_bytes or 0)
    assert not (has_room and offer.step_time(size + 1) <= tpot)


def test_offers_are_by_price_and_devices_that_do_not_compute_are_never_alone() -> None:
    found = offers(GQA, CHATS, [BIG, SMALL], 4)
    assert found == sorted(found, key=lambda offer: -offer.rate_per_price)
    assert {offer.mix.computing.name for offer in found} == {"big"}
    assert str(next(offer.mix for offer in found if offer.mix.num_memory)).startswith("1 big + ")
    assert offers(GQA, Demand(256.0, 256.0, 1e-4), [BIG, SMALL], 4) == []


def test_two_halves_hide_the_shorter_of_products_and_attention() -> None:
    whole, halves = (Offer(GQA, CHATS, Mix(BIG, 1, SMALL, 4, parts)) for parts in (1, 2))
    assert halves.step_time(512) < whole.step_time(512)
    assert halves.step_time(2) > whole.step_time(2)  # weights are read twice
    assert whole.num_units(10.0) == -(-10 * 256 // int(whole.output_rate))
