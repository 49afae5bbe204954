"""The steps that the cost model takes as captured, and the costs that these save."""

from dataclasses import replace

import pytest
from machines import H200

from loong.core.cost.cuda_graph_limits import NO_GRAPHS
from loong.core.cost.work import InstanceWork
from loong.hardware.devices import DEVICES
from loong.scheduler.cost.roofline import ModelShape, cuda_graph_limits
from loong.worker.steps import (
    attended_inputs,
    mailbox_exchange,
    mixed_graph,
    mixed_inputs,
    ring_inputs,
)

GRAPH_LIMITS = H200.graph_limits


def test_its_limits_fill_the_room_of_workers() -> None:
    assert GRAPH_LIMITS.most_rows == mixed_graph._SIZES[-1] == mixed_inputs.GROUP_STEP_SIZES[-1]
    assert GRAPH_LIMITS.most_prompts == attended_inputs.MAX_PROMPT_BLOCKS
    assert GRAPH_LIMITS.most_kv_rows == ring_inputs.KV_SIZES[-1]
    assert GRAPH_LIMITS.most_kv_room == ring_inputs.MAX_KV_ROOM


@pytest.mark.parametrize(("num_kv_heads", "most_kv_room"), [(32, 4096), (16, 8192), (8, 16_384), (4, 16_384)])
def test_what_travels_is_captured_as_far_as_the_room_of_queries_holds_keys_and_values(
    num_kv_heads: int, most_kv_room: int
) -> None:
    shape = ModelShape(32, 4096, 32, num_kv_heads, 128, 0, 0)
    limits = cuda_graph_limits(shape, DEVICES["h200"].graph_limits)
    assert (limits.most_kv_rows, limits.most_kv_room) == (4096, most_kv_room)
    assert most_kv_room == min(
        ring_inputs.MAX_KV_ROOM, mailbox_exchange.QUERY_ROOM * 32 // (2 * num_kv_heads)
    )
    limits = cuda_graph_limits(shape, DEVICES["cpu"].graph_limits)
    assert limits.most_kv_rows == limits.most_kv_room == 0


@pytest.mark.parametrize(
    ("work", "is_captured"),
    [
        (InstanceWork(num_tokens=2048, num_keys=4096, num_pairs=50e6), True),  # few keys
        (InstanceWork(num_tokens=2048, num_keys=4097, num_pairs=50e6), False),
        (InstanceWork(num_tokens=2049, num_keys=4096, num_pairs=50e6), False),
        (InstanceWork(num_tokens=256, num_keys=512, num_pairs=80e6), True),
        (InstanceWork(num_tokens=255, num_keys=510, num_pairs=80e6), False),
        (InstanceWork(num_tokens=200, num_keys=400_000, num_pairs=255 * 400_000), True),  # few queries
        (InstanceWork(num_tokens=200, num_keys=400_000, num_pairs=256 * 400_000), False),
        (InstanceWork(num_tokens=600, num_keys=110_000, num_pairs=600 * 110_000), True),  # soon done
        (InstanceWork(num_tokens=600, num_keys=120_000, num_pairs=600 * 120_000), False),
        (InstanceWork(num_tokens=600, num_keys=55_000, num_pairs=1200 * 55_000), True),
        (InstanceWork(num_tokens=600, num_keys=60_000, num_pairs=1200 * 60_000), False),
        (InstanceWork(num_tokens=200, num_keys=200, num_prompt_blocks=64), True),
        (InstanceWork(num_tokens=200, num_keys=200, num_prompt_blocks=65), False),
    ],
)
def test_a_step_in_which_no_kv_travels_is_captured_up_to_some_rows_keys_and_prompts(
    work: InstanceWork, is_captured: bool
) -> None:
    assert GRAPH_LIMITS.has(work) is is_captured
    assert GRAPH_LIMITS.has(replace(work, num_sent_queries=work.num_tokens)) is is_captured
    assert not NO_GRAPHS.has(work)


def test_lists_have_room_for_the_keys_of_all_rows_and_slots_and_a_bounded_part_is_copied() -> None:
    for num_slots in (0, 100, 10**6):
        listed, copied = GRAPH_LIMITS.num_listed(num_slots), GRAPH_LIMITS.num_copied(num_slots)
        assert listed >= GRAPH_LIMITS.lists_a_slot * num_slots
        assert listed >= GRAPH_LIMITS.keys_a_row * GRAPH_LIMITS.most_rows
        assert copied <= min(listed, GRAPH_LIMITS.most_copied)
    assert copied == GRAPH_LIMITS.most_copied


# Of two members that compute a thousand tokens each, behind as many, and keep what they make.
RINGED = InstanceWork(
    num_tokens=1000, num_blocks=1, num_ring_blocks=1, num_keys=4000, num_ring_keys=2000, num_hops=1
)


@pytest.mark.parametrize(
    ("beside", "is_captured"),
    [
        ({}, True),
        ({"num_tokens": 4096}, True),
        ({"num_tokens": 4097}, False),
        ({"num_keys": 18_384}, True),  # 16,384 of its own
        ({"num_keys": 18_385}, False),
        ({"num_ring_keys": 16_385, "num_keys": 18_000}, False),
        ({"num_ring_keys": 2 * 16_384, "num_keys": 40_960, "num_hops": 2}, True),
        ({"num_ring_keys": 2 * 16_384, "num_keys": 40_961, "num_hops": 2}, False),  # of all members
        ({"num_decode_keys": 1}, False),
        ({"num_sent_queries": 1}, False),
        ({"num_blocks": 2}, False),  # of a prompt whose KV stays
    ],
)
def test_a_step_is_captured_if_nothing_but_kv_travels_up_to_some_rows_of_each_member(
    beside: dict[str, int], is_captured: bool
) -> None:
    work = replace(RINGED, **beside)
    assert GRAPH_LIMITS.has(work) is is_captured
    assert not NO_GRAPHS.has(work)
    assert not replace(GRAPH_LIMITS, most_kv_rows=999).has(work)
    assert not replace(GRAPH_LIMITS, most_kv_room=999).has(work)
    assert not replace(GRAPH_LIMITS, most_gathered=work.num_keys - 1).has(work)


def test_a_captured_step_takes_no_launches() -> None:
    few = replace(RINGED, num_tokens=10, num_keys=40, num_ring_keys=20)
    launches = H200.coefficients.launch + H200.coefficients.ring_launch + H200.coefficients.hop_launch
    assert H200.instance_time(few) < launches / 2
    assert H200.instance_time(replace(few, num_blocks=2)) >= launches + H200.coefficients.beside_ring


def test_what_travels_in_a_captured_step_hides_under_nothing() -> None:
    longer = replace(RINGED, num_pairs=1e9)  # attention enough to hide any ring
    still = replace(longer, num_ring_keys=1953)
    transfer = H200.coefficients.ring_key * (2000 - 1953)
    assert H200.instance_time(longer) - H200.instance_time(still) == pytest.approx(transfer)
    launched, unsent = (replace(work, num_blocks=2) for work in (longer, still))
    assert H200.instance_time(launched) == pytest.approx(H200.instance_time(unsent))


@pytest.mark.parametrize(
    ("work", "reads_keys", "meets_parts"),
    [
        (InstanceWork(num_tokens=600, num_keys=40_000), True, False),
        (InstanceWork(num_tokens=200, num_keys=30_000, num_pairs=6e6), False, True),  # captured
        (InstanceWork(num_tokens=600, num_keys=60_000, num_sent_queries=600), True, True),
        (replace(RINGED, num_keys=60_000), True, True),
        (InstanceWork(num_keys=60_000), True, True),  # it attends for others alone
    ],
)
def test_history_is_copied_where_it_is_launched_and_met_in_parts_in_groups_and_captured_steps(
    work: InstanceWork, reads_keys: bool, meets_parts: bool
) -> None:
    num_pairs = work.num_pairs or 2e9  # enough to hide launches
    work = replace(work, num_pairs=num_pairs, num_part_pairs=num_pairs / 2)
    key, part = (
        replace(H200, coefficients=replace(H200.coefficients, **{name: 0.0})) for name in ("key", "part_pair")
    )
    assert (key.instance_time(work) < H200.instance_time(work)) is reads_keys
    assert (part.instance_time(work) < H200.instance_time(work)) is meets_parts
