from hypothesis import given
from hypothesis import strategies as st

from loong.core.instance import ESPGroup
from loong.core.placement import Placement, striped
from loong.core.plan import Transfer
from loong.core.positions import is_partition
from loong.core.request import RequestView
from loong.scheduler.common.striping import batch_of, decode_part, retained_part, striped_part, whole_part


@st.composite
def repairs(draw: st.DrawFn) -> tuple[RequestView, int, ESPGroup]:
    """Return a request that has lost some KV, how many tokens to compute, and the group that is left."""
    num_instances, num_cached = draw(st.integers(2, 5)), draw(st.integers(1, 60))
    placement = striped("r", range(num_cached), tuple(range(num_instances)))
    lost = draw(st.sets(st.integers(0, num_instances - 1), min_size=1, max_size=num_instances - 1))
    for instance_id in lost:
        placement = placement.without(instance_id)
    view = RequestView("r", num_cached, 1, 4, 0.0, None, placement)
    group = ESPGroup(tuple(i for i in range(num_instances) if i not in lost))
    return view, draw(st.integers(1, view.num_uncomputed_tokens)), group


@given(repairs(), st.data())
def test_a_repair_computes_and_keeps_the_first_missing_positions(
    chunk: tuple[RequestView, int, ESPGroup], data: st.DataObject
) -> None:
    view, num_tokens, group = chunk
    due = sorted({p for positions in view.missing for p in positions})[:num_tokens]
    free = dict.fromkeys(group.instance_ids, num_tokens)
    for part in (
        striped_part(view, num_tokens, group, data.draw(st.sampled_from(Transfer))),
        retained_part(view, num_tokens, group, free),
        retained_part(view, num_tokens, group, {**dict.fromkeys(free, 0), min(free): num_tokens}),
        whole_part(view, num_tokens, group.leader_id),
    ):
        assert sorted(p for block in part.queries for p in block.positions) == due
        assert sorted(p for segment in part.writes for p in segment.positions) == due
        assert part.num_tokens == num_tokens
        assert set(part.keeper_ids) <= set(group.instance_ids)
        sizes = [sum(len(b.positions) for b in part.queries if b.master_id == i) for i in group.instance_ids]
        assert max(sizes) - min(sizes) <= 1 or len({b.master_id for b in part.queries}) == 1


@st.composite
def chunks(draw: st.DrawFn) -> tuple[RequestView, int, ESPGroup]:
    """Return a request with some KV, how many tokens to compute, and a group."""
    group = ESPGroup(tuple(draw(st.permutations(range(6)))[: draw(st.integers(1, 6))]))
    num_cached, num_tokens = draw(st.integers(0, 50)), draw(st.integers(1, 200))
    placement = striped("r", range(num_cached), group.instance_ids) if num_cached else Placement()
    return RequestView("r", num_cached + num_tokens, 0, 4, 0.0, None, placement), num_tokens, group


@given(chunks(), st.sampled_from(Transfer))
def test_stripes_partition_the_chunk_and_differ_by_one_token_at_most(
    chunk: tuple[RequestView, int, ESPGroup], transfer: Transfer
) -> None:
    view, num_tokens, group = chunk
    part = striped_part(view, num_tokens, group, transfer)
    first = view.num_computed_tokens
    assert is_partition((b.positions for b in part.queries), range(first, first + num_tokens))
    lengths = [len(block.positions) for block in part.queries]
    assert max(lengths) - min(lengths) <= 1
    assert len(lengths) == min(num_tokens, group.dop)
    assert all(lengths)


@given(chunks())
def test_token_i_of_a_chunk_is_at_ring_position_i_mod_p(chunk: tuple[RequestView, int, ESPGroup]) -> None:
    view, num_tokens, group = chunk
    for block in striped_part(view, num_tokens, group, Transfer.KV).queries:
        offsets = [position - view.num_computed_tokens for position in block.positions]
        assert {group.instance_ids[i % group.dop] for i in offsets} == {block.master_id}


@given(chunks(), st.data())
def test_retained_kv_partitions_the_chunk_within_what_is_free(
    chunk: tuple[RequestView, int, ESPGroup], data: st.DataObject
) -> None:
    view, num_tokens, group = chunk
    keepers = data.draw(st.sets(st.sampled_from(group.instance_ids), min_size=1))
    free = {i: data.draw(st.integers(0, 300)) for i in keepers}
    free[min(keepers)] += max(0, num_tokens - sum(free.values()))
    part = retained_part(view, num_tokens, group, free)
    first = view.num_computed_tokens
    assert is_partition((s.positions for s in part.writes), range(first, first + num_tokens))
    assert all(len(s.positions) <= free[s.instance_id] for s in part.writes)
    assert len(part.writes) <= len(keepers)
    assert {s.instance_id for s in part.writes} <= keepers


def test_retained_kv_is_striped_over_those_who_keep_it() -> None:
    view = RequestView("r", 100, 0, 1, 0.0, None, Placement())
    part = retained_part(view, 100, ESPGroup((0, 1, 2)), {0: 300, 2: 50})
    assert [(s.instance_id, s.positions) for s in part.writes] == [
        (0, range(0, 100, 2)),
        (2, range(1, 100, 2)),
    ]


def test_retained_kv_is_spread_in_proportion_to_free_slots_where_stripes_do_not_fit() -> None:
    view = RequestView("r", 100, 0, 1, 0.0, None, Placement())
    part = retained_part(view, 100, ESPGroup((0, 1, 2)), {0: 120, 2: 40})
    assert [(s.instance_id, s.positions) for s in part.writes] == [(0, range(75)), (2, range(75, 100))]


def test_a_whole_chunk_is_computed_and_kept_by_one_master() -> None:
    view = RequestView("r", 9, 0, 1, 0.0, None, striped("r", range(4), (0, 1)))
    part = whole_part(view, 5, 1)
    assert [(b.positions, b.master_id, b.transfer) for b in part.queries] == [
        (range(4, 9), 1, Transfer.QUERY)
    ]
    assert [(s.positions, s.instance_id) for s in part.writes] == [(range(4, 9), 1)]


def test_a_lease_reserves_no_more_than_a_request_may_still_produce() -> None:
    view = RequestView("r", 4, 1, 4, 0.0, None, striped("r", range(4), (0,)))
    batch = batch_of(ESPGroup((0,)), [decode_part(view, 0, num_steps=16)], num_steps=16)
    assert batch.num_steps == 16
    assert batch.queries[0].positions == range(4, 5)
    assert batch.writes[0].positions == range(4, 7)
