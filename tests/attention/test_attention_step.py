"""Every instance derives the same step from the same plan, and each from its own side."""

from collections import Counter

import torch
from attention_steps import EVERYONE, GivenStep, given_steps
from hypothesis import given
from hypothesis import strategies as st

from loong.attention.attention_step import (
    all_positions,
    concatenate,
    consecutive_slices,
    row_range,
)
from loong.core.plan import Transfer

ranges = st.builds(
    lambda first, step, count: range(first, first + step * count, step),
    st.integers(0, 40),
    st.integers(1, 5),
    st.integers(0, 9),
)


@given(given_steps())
def test_each_position_travels_from_one_instance_and_is_there_once(step: GivenStep) -> None:
    for request_id, known in step.known.items():
        there = [p for i in EVERYONE for kv in step.on(i).kv_on(i, request_id) for p in kv]
        assert sorted(there) == sorted(known)


@given(given_steps())
def test_all_instances_agree_on_the_order_in_which_kv_travels(step: GivenStep) -> None:
    steps = [step.on(i) for i in step.instance_ids]
    for request_id in step.batch.request_ids:
        for source_id in step.instance_ids:
            assert len({own.kv_on(source_id, request_id) for own in steps}) == 1


@given(given_steps())
def test_history_travels_before_new_kv(step: GivenStep) -> None:
    for instance_id in step.instance_ids:
        own = step.on(instance_id)
        for request_id, placement in step.placements.items():
            history = placement.on(instance_id)
            assert own.kv_on(instance_id, request_id)[: len(history)] == history


@given(given_steps())
def test_keys_are_those_that_travel_in_as_few_ranges(step: GivenStep) -> None:
    for instance_id in step.instance_ids:
        own = step.on(instance_id)
        for request_id in step.batch.request_ids:
            kv, keys = own.kv_on(instance_id, request_id), own.keys_of(request_id)
            assert sorted(p for r in keys for p in r) == sorted(p for r in kv for p in r)
            assert len(keys) <= len(kv)


@given(given_steps())
def test_blocks_of_all_members_are_the_batch_and_their_rows_follow_each_other(step: GivenStep) -> None:
    steps = [step.on(i) for i in step.instance_ids]
    assert Counter(b for own in steps for b in own.blocks) == Counter(step.batch.queries)
    for own in steps:
        rows = [row for block in own.blocks for row in range(own.rows[block].start, own.rows[block].stop)]
        assert rows == list(range(sum(len(block.positions) for block in own.blocks)))


@given(given_steps())
def test_a_block_meets_an_instance_that_has_a_key_before_its_end(step: GivenStep) -> None:
    for instance_id in step.instance_ids:
        own = step.on(instance_id)
        for block in step.batch.queries:
            for holder_id in EVERYONE:
                keys = [p for kv in own.kv_on(holder_id, block.request_id) for p in kv]
                is_seen = any(key <= block.positions[-1] for key in keys)
                assert own.meets(block, holder_id) == is_seen


@given(given_steps())
def test_peers_know_each_other(step: GivenStep) -> None:
    peers = {i: step.on(i).peer_ids for i in step.instance_ids}
    for instance_id, its_peers in peers.items():
        assert sorted((instance_id, *its_peers)) == sorted(step.instance_ids)


@given(given_steps())
def test_requests_of_both_transfers_are_all_requests(step: GivenStep) -> None:
    own = step.on(step.batch.group.leader_id)
    named = [r for transfer in Transfer for r in own.requests(transfer)]
    assert sorted(named) == sorted(step.batch.request_ids)


@given(given_steps())
def test_holes_are_known_to_every_instance(step: GivenStep) -> None:
    has_holes = any(
        set(range(p.stop)) - {n for s in p.segments for n in s.positions} for p in step.placements.values()
    )
    assert {step.on(i).has_holes for i in step.instance_ids} == {has_holes}


@given(st.lists(st.integers(0, 9), max_size=6))
def test_slices_adjoin_from_0(sizes: list[int]) -> None:
    members = [row for piece in consecutive_slices(sizes) for row in row_range(piece).tolist()]
    assert members == list(range(sum(sizes)))
    assert [piece.stop - piece.start for piece in consecutive_slices(sizes)] == sizes


@given(st.lists(ranges, max_size=4))
def test_positions_are_listed_one_range_after_the_other(positions: list[range]) -> None:
    listed = all_positions(positions)
    assert listed.dtype == torch.int64
    assert listed.tolist() == [p for each in positions for p in each]
    assert torch.equal(listed, concatenate(torch.tensor(each, dtype=torch.int64) for each in positions))
