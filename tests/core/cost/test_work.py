"""The counted work of a step equals that of attention by its definition."""

from collections.abc import Mapping
from dataclasses import astuple, fields, replace
from itertools import accumulate

import pytest
from chaotic_batches import chaotic_batches

from loong.core.attention_tasks import attention_tasks, num_retained_tokens
from loong.core.cost.work import InstanceWork, Phase, StepWork, WorkCount, step_work
from loong.core.instance import ESPGroup
from loong.core.placement import KVSegment, Placement, striped
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.positions import dealt
from loong.core.request import RequestId
from loong.core.shared_kv import LEAST_ALONE

SEEDS = range(6)


def total(work: StepWork) -> InstanceWork:
    parts = (*work.instances.values(), *work.holders.values())
    return InstanceWork(*map(sum, zip(*map(astuple, parts), strict=True)))


def num_new(batch: BatchPlan, request_id: RequestId) -> int:
    return sum(len(block.positions) for block in batch.blocks_of(request_id))


def test_every_query_is_computed_once_and_meets_every_key_before_it() -> None:
    for batch, placements in chaotic_batches(SEEDS):
        counted = total(step_work(batch, placements))
        new = {r: num_new(batch, r) for r in batch.request_ids}
        assert counted.num_tokens == sum(new.values())
        masters = {(block.request_id, block.master_id) for block in batch.queries}
        assert counted.num_blocks == len(masters), "those of one request at one master count as one"
        num_pairs = sum(position + 1 for block in batch.queries for position in block.positions)
        assert counted.num_pairs + counted.num_decode_keys == pytest.approx(num_pairs)


def test_attention_calls_are_those_of_the_workers_but_for_stripes_that_the_mask_removes() -> None:
    num_calls = num_counted = 0
    for batch, placements in chaotic_batches(SEEDS):
        if any(placements[request_id].has_holes for request_id in batch.request_ids):
            continue  # a repair's blocks at one master count as one
        work = step_work(batch, placements)
        tasks = attention_tasks(batch, placements)
        calls = {(task.block, task.segment.instance_id, task.instance_id) for task in tasks}
        for instance_id, part in {**work.instances, **work.holders}.items():
            made = sum(1 for call in calls if call[2] == instance_id)
            assert part.num_attends >= made
            num_calls += made
            num_counted += part.num_attends
    assert num_counted < 1.1 * num_calls


def test_retention_is_counted_to_the_nearest_token() -> None:
    for batch, placements in chaotic_batches(SEEDS):
        num_kept = total(step_work(batch, placements)).num_kept_keys
        assert num_kept <= num_retained_tokens(batch)
        if not num_retained_tokens(batch):
            assert num_kept == 0


def ring_of(num_tokens: int, placements: Mapping[RequestId, Placement]) -> StepWork:
    """Return a chunk striped over instances 0 and 1 in the group of 0, 1 and 2."""
    first = placements["r"].num_tokens
    chunk = range(first, first + num_tokens)
    blocks = tuple(QueryBlock("r", chunk[i::2], i, Transfer.KV) for i in (0, 1))
    writes = (KVSegment("r", chunk, 2),)
    return step_work(BatchPlan(ESPGroup((0, 1, 2)), blocks, writes), placements)


def test_in_a_ring_all_that_an_instance_does_not_have_comes_to_it() -> None:
    work = ring_of(100, {"r": striped("r", range(30), (0, 2))})
    assert work.has_ring
    assert not work.has_exchange
    assert [part.num_ring_keys for part in work.instances.values()] == [65, 80, 115]
    assert [part.num_kept_keys for part in work.instances.values()] == [0, 0, 100]
    assert [part.num_attends for part in work.instances.values()] == [3, 3, 0]
    assert [part.num_hops for part in work.instances.values()] == [2, 2, 2]


def test_every_instance_lays_out_all_requests_and_segments() -> None:
    work = ring_of(100, {"r": striped("r", range(30), (0, 2))})
    assert {(part.num_requests, part.num_segments) for part in work.instances.values()} == {(1, 2)}
    assert work.num_requests == 1


def test_queries_travel_to_every_other_holder_of_kv() -> None:
    group = ESPGroup((0, 1, 2))
    placements = {"r": striped("r", range(30), (0, 1)), "s": Placement()}
    blocks = (
        QueryBlock("r", range(30, 31), 2, Transfer.QUERY),
        QueryBlock("s", range(5), 0, Transfer.QUERY),
    )
    writes = tuple(KVSegment(b.request_id, b.positions, b.master_id) for b in blocks)
    work = step_work(BatchPlan(group, blocks, writes), placements)
    assert work.has_exchange
    assert [part.num_sent_queries for part in work.instances.values()] == [0, 0, 2]
    assert [part.num_decode_keys for part in work.instances.values()] == [15, 15, 1]
    assert work.instances[0].num_pairs == 15


def decode_of(num_held: dict[int, int], master_id: int, *group: int) -> StepWork:
    """Return a decode of a request with these numbers of tokens on each instance."""
    starts = accumulate(num_held.values(), initial=0)
    segments = (
        KVSegment("r", range(first, first + num), i)
        for first, (i, num) in zip(starts, num_held.items(), strict=False)
    )
    placement = Placement(tuple(segments))
    block = QueryBlock("r", range(placement.num_tokens, placement.num_tokens + 1), master_id, Transfer.QUERY)
    writes = (KVSegment("r", block.positions, master_id),)
    return step_work(BatchPlan(ESPGroup(group), (block,), writes), {"r": placement})


def test_an_instance_outside_the_group_attends_as_a_member_would_and_answers_the_queries() -> None:
    outside, inside = decode_of({1: 20, 2: 30}, 0, 0), decode_of({1: 20, 2: 30}, 0, 0, 1, 2)
    assert inside.holders == {}
    assert outside.instances.keys() == {0}
    assert outside.instances[0] == inside.instances[0]
    assert outside.holders == {i: replace(inside.instances[i], num_sent_queries=1) for i in (1, 2)}
    assert outside.has_exchange
    assert outside.phase is Phase.DECODE


def test_a_chunk_whose_history_is_outside_the_group_moves_its_queries_there() -> None:
    chunk, placement = range(30, 50), striped("r", range(30), (1, 2))
    blocks = tuple(QueryBlock("r", chunk[i::2], i, Transfer.QUERY) for i in (0, 1))
    writes = tuple(KVSegment("r", block.positions, block.master_id) for block in blocks)
    work = step_work(BatchPlan(ESPGroup((0, 1)), blocks, writes), {"r": placement})
    assert {i: part.num_sent_queries for i, part in work.instances.items()} == {0: 20, 1: 20}
    (holder,) = work.holders.values()
    assert (holder.num_tokens, holder.num_keys, holder.num_pairs) == (0, 15, 300)
    assert holder.num_sent_queries == 20


def test_kv_that_is_pushed_to_an_instance_outside_the_group_is_kept_there() -> None:
    block = QueryBlock("r", range(40), 0, Transfer.QUERY)
    batch = BatchPlan(ESPGroup((0,)), (block,), (KVSegment("r", range(40), 1),))
    work = step_work(batch, {"r": Placement()})
    assert work.holders[1] == InstanceWork(num_requests=1, num_ring_keys=40, num_kept_keys=40)


def test_what_is_added_to_a_copy_serves_nobody_in_what_it_is_of() -> None:
    count = WorkCount((0,))
    count.add_decode(0, striped("r", range(9), (1,)))
    other = count.copy()
    other.add_decode(0, striped("s", range(9), (1,)))
    assert (count.holders[1].num_decode_keys, other.holders[1].num_decode_keys) == (9, 18)


@pytest.mark.parametrize("held_on", [(1,), (2, 3), (0, 1, 2), (0,)])
@pytest.mark.parametrize("others_on", [(), (0,), (2,), (1, 2, 3)])
def test_a_decode_whose_history_moves_counts_like_one_whose_history_was_there(
    held_on: tuple[int, ...], others_on: tuple[int, ...]
) -> None:
    moved, there = WorkCount((0,), is_lease=True), WorkCount((0,), is_lease=True)
    for number, instance_id in enumerate(others_on):
        for count in (moved, there):
            count.add_decode(0, striped(f"other {number}", range(50), (instance_id,)))
    moved.add_decode(0, striped("r", range(90), held_on))
    moved.move_decode(0, striped("r", range(90), held_on))
    there.add_decode(0, striped("r", range(90), (0,)))
    assert moved == there


def test_keys_of_a_moved_history_that_others_read_too_are_still_read_where_they_are() -> None:
    node = KVSegment("node", range(64), 1)
    own = KVSegment("r", range(64, 70), 1)
    placement = Placement((node, own), (node,))
    count = WorkCount((0,), is_lease=True)
    for _ in range(2):
        count.add_decode(0, placement)
    count.move_decode(0, placement)
    assert count.holders[1].num_decode_keys == 64 + 6
    assert count.instances[0].num_decode_keys == 2 + 70


def test_only_the_first_step_reports_the_group_and_only_leases_settle() -> None:
    for batch, placements in chaotic_batches(SEEDS):
        first, later = step_work(batch, placements), step_work(batch, placements, is_first=False)
        assert (first.is_first, later.is_first) == (True, False)
        assert first.is_lease == later.is_lease == (batch.num_steps > 1)


def test_decodes_on_one_instance_count_the_same_together_as_one_by_one() -> None:
    torn = Placement((KVSegment("b", range(5), 0), KVSegment("b", range(9, 12), 0)))
    placements = [striped("a", range(7), (0,)), torn]
    together, one_by_one = WorkCount((0,)), WorkCount((0,))
    together.add_lone_decodes(placements)
    for placement in placements:
        one_by_one.add_decode(0, placement)
    assert together == one_by_one


def test_what_is_added_to_a_copy_is_not_added_to_what_it_is_of() -> None:
    work = InstanceWork(*range(1, 1 + len(fields(InstanceWork))))
    other = work.copy()
    assert other == work
    other.num_tokens += 1
    assert other != work


@pytest.mark.parametrize("transfer", list(Transfer))
@pytest.mark.parametrize("lost_id", [0, 3])
def test_a_repair_is_counted_without_the_later_keys_that_the_mask_removes(
    transfer: Transfer, lost_id: int
) -> None:
    placement = striped("r", range(80), (0, 1, 2, 3)).without(lost_id)
    group = ESPGroup(tuple(i for i in range(4) if i != lost_id))
    stripes = zip(dealt(placement.holes, 3), group.instance_ids, strict=True)
    blocks = tuple(QueryBlock("r", p, i, transfer) for pieces, i in stripes for p in pieces)
    batch = BatchPlan(group, blocks, tuple(KVSegment("r", b.positions, b.master_id) for b in blocks))
    queries = {p for block in blocks for p in block.positions}
    keys = queries | {p for segment in placement.segments for p in segment.positions}
    work = total(step_work(batch, {"r": placement}))
    assert work.num_tokens == len(queries)
    assert work.num_pairs == pytest.approx(sum(key <= query for query in queries for key in keys))


def test_a_single_position_before_later_kv_counts_as_a_chunk() -> None:
    placement = striped("r", range(8), (0,)).removing(KVSegment("r", range(3, 4), 0))
    block = QueryBlock("r", range(3, 4), 0, Transfer.QUERY)
    batch = BatchPlan(ESPGroup((0,)), (block,), (KVSegment("r", range(3, 4), 0),))
    work = total(step_work(batch, {"r": placement}))
    assert work.num_decode_keys == 0
    assert work.num_pairs == pytest.approx(4)


SHARED = 90


def sharers(*, are_sharing: bool) -> dict[RequestId, Placement]:
    """Return three requests behind a prefix whose stripes are on three instances, and 9 tokens of each."""
    node, found = striped("node", range(SHARED), (0, 1, 2)), {}
    for request_id in "abc":
        own = striped(request_id, range(SHARED, SHARED + 9), (0, 1, 2))
        placement = node.of(request_id).adding(own.segments)
        found[request_id] = placement.sharing(node.segments if are_sharing else ())
    return found


def chunks_of(num_tokens: int, transfer: Transfer, *, are_sharing: bool) -> Mapping[int, InstanceWork]:
    """Return the work of a chunk of each sharer, striped over all three instances."""
    placements, members = sharers(are_sharing=are_sharing), (0, 1, 2)
    parts = [(r, i, range(99 + i, 99 + num_tokens, 3)) for r in placements for i in members]
    blocks = tuple(QueryBlock(r, positions, i, transfer) for r, i, positions in parts)
    writes = tuple(KVSegment(r, positions, i) for r, i, positions in parts)
    return step_work(BatchPlan(ESPGroup(members), blocks, writes), placements).instances


def test_what_prompts_share_goes_round_a_ring_once_and_is_read_once() -> None:
    once, apart = (chunks_of(30, Transfer.KV, are_sharing=way) for way in (True, False))
    for instance_id, work in once.items():
        saved = 2 * SHARED  # for the second and the third
        assert work.num_ring_keys == apart[instance_id].num_ring_keys - saved * 2 // 3  # a third is here
        assert work.num_keys == apart[instance_id].num_keys - saved
        assert work.num_relayed_prompt_keys == saved
        assert work.num_pairs == apart[instance_id].num_pairs


@pytest.mark.parametrize(("num_tokens", "num_readers"), [(30, 3), (LEAST_ALONE, 0)])
def test_chunks_of_few_queries_read_what_they_share_once(num_tokens: int, num_readers: int) -> None:
    once, apart = (chunks_of(num_tokens, Transfer.QUERY, are_sharing=way) for way in (True, False))
    for instance_id, work in once.items():
        num_saved = max(0, num_readers - 1) * SHARED // 3
        assert (work.num_keys, work.num_relayed_prompt_keys) == (
            apart[instance_id].num_keys - num_saved,
            num_saved,
        )
