import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from loong.core.errors import InvalidPlanError
from loong.core.placement import InstanceId, KVSegment, Placement, striped

laws = examples(18, thorough=300)
NUM_POSITIONS = 30
owners = st.lists(st.sampled_from([None, 0, 1, 2]), min_size=NUM_POSITIONS, max_size=NUM_POSITIONS)
parts = st.builds(range, st.integers(0, 20), st.integers(0, NUM_POSITIONS), st.integers(1, 5))


def singles(where: dict[int, InstanceId]) -> list[KVSegment]:
    return [KVSegment("r", range(p, p + 1), instance_id) for p, instance_id in where.items()]


def where_is(placement: Placement) -> dict[int, InstanceId]:
    found = [(p, segment.instance_id) for segment in placement.segments for p in segment.positions]
    assert len(found) == len(dict(found)), "a position is in two segments"
    return dict(found)


def known(owner_list: list[InstanceId | None]) -> dict[int, InstanceId]:
    return {p: i for p, i in enumerate(owner_list) if i is not None}


@laws
@given(owners, st.data())
def test_positions_may_be_added_in_any_order(
    owner_list: list[InstanceId | None], data: st.DataObject
) -> None:
    where = known(owner_list)
    placement = Placement().adding(data.draw(st.permutations(singles(where))))
    assert where_is(placement) == where
    assert placement.num_tokens == len(where)
    assert placement.instance_ids == tuple(sorted(set(where.values())))
    assert sum(placement.tokens_by_instance().values()) == len(where)
    for instance_id in range(3):
        held = sum(len(positions) for positions in placement.on(instance_id))
        assert placement.tokens_by_instance()[instance_id] == held


@laws
@given(owners, parts, st.integers(0, 2))
def test_removing_takes_just_the_segment_and_adding_brings_it_back(
    owner_list: list[InstanceId | None], part: range, instance_id: InstanceId
) -> None:
    where = known(owner_list)
    placement = Placement().adding(singles(where))
    segment = KVSegment("r", part, instance_id)
    is_there = all(where.get(p) == instance_id for p in part)
    assert placement.holds(segment) == is_there
    if not is_there:
        with pytest.raises(InvalidPlanError, match="is not in"):
            placement.removing(segment)
        return
    rest = placement.removing(segment)
    assert where_is(rest) == {p: i for p, i in where.items() if p not in part}
    assert where_is(rest.adding((segment,))) == where


@laws
@given(owners, st.integers(0, 2), st.integers(0, 3), st.data())
def test_moving_conserves_every_token(
    owner_list: list[InstanceId | None], source: InstanceId, destination: InstanceId, data: st.DataObject
) -> None:
    where = known(owner_list)
    placement = Placement().adding(singles(where))
    for segment in placement.segments:
        if segment.instance_id == source != destination:
            part = segment.positions[:: data.draw(st.integers(1, 3))]
            moved = placement.moving(KVSegment("r", part, source), destination)
            expected = {p: destination if p in part else i for p, i in where.items()}
            assert where_is(moved) == expected
            assert moved.num_tokens == placement.num_tokens


@laws
@given(owners, st.integers(0, 3))
def test_without_an_instance_all_others_keep_theirs(
    owner_list: list[InstanceId | None], instance_id: InstanceId
) -> None:
    where = known(owner_list)
    left = Placement().adding(singles(where)).without(instance_id)
    assert where_is(left) == {p: i for p, i in where.items() if i != instance_id}


@laws
@given(st.integers(0, 50), st.integers(0, 50), st.permutations(range(4)), st.integers(1, 4))
def test_token_i_of_a_striped_chunk_is_at_ring_position_i_mod_p(
    start: int, length: int, order: list[InstanceId], dop: int
) -> None:
    ring = tuple(order[:dop])
    placement = striped("r", range(start, start + length), ring)
    assert where_is(placement) == {start + i: ring[i % dop] for i in range(length)}
    assert all(segment.positions for segment in placement.segments)


@laws
@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.integers(1, 16))
def test_chunks_in_the_same_stripes_are_one_run_an_instance_however_short(
    rounds: list[int], dop: int
) -> None:
    placement, ring, first = Placement(), tuple(range(dop)), 0
    for num_rounds in rounds:
        chunk = range(first, first + num_rounds * dop)
        placement, first = placement.adding(striped("r", chunk, ring).segments), chunk.stop
    assert where_is(placement) == {position: position % dop for position in range(first)}
    assert len(placement.segments) == dop


@laws
@given(st.integers(1, 60), st.integers(1, 6), st.integers(0, 5), st.integers(1, 40))
def test_decode_tokens_of_one_master_are_one_run_beside_its_stripe(
    num_prompt_tokens: int, dop: int, master: InstanceId, num_output_tokens: int
) -> None:
    placement = striped("r", range(num_prompt_tokens), tuple(range(dop)))
    for position in range(num_prompt_tokens, num_prompt_tokens + num_output_tokens):
        placement = placement.adding((KVSegment("r", range(position, position + 1), master),))
    assert len(placement.on(master)) <= 2
