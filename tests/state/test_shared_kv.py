"""Holders of a prompt's KV, compared with sets of positions."""

from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from loong.core.placement import KVSegment, striped
from loong.state.shared_kv import SharedKV

HOLDERS = ("a", "b", "c")
ranges = st.builds(range, st.integers(0, 12), st.integers(0, 12), st.integers(1, 4)).filter(len)
leavings = st.lists(st.tuples(st.sampled_from(HOLDERS), ranges, st.integers(0, 2)), max_size=8)


@given(leavings)
def test_slots_stay_while_others_hold_them(leaving: list[tuple[str, range, int]]) -> None:
    placement = striped("a", range(12), (0, 1))
    shared = SharedKV("a", placement, HOLDERS)
    holders: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    for segment in placement.segments:
        for position in segment.positions:
            holders[position, segment.instance_id] = set(HOLDERS)
    for holder_id, positions, instance_id in leaving:
        staying = 0
        for position in positions:
            of_position = holders[position, instance_id]
            staying += len(of_position) > 1 and holder_id in of_position
            of_position.discard(holder_id)
        reported = shared.let_go(holder_id, (KVSegment(holder_id, positions, instance_id),))
        assert reported == Counter({instance_id: staying} if staying else {})
    for holder_id in HOLDERS:
        held = {(p, s.instance_id) for s in shared.held_by(holder_id).segments for p in s.positions}
        assert held == {place for place, ids in holders.items() if holder_id in ids and len(ids) > 1}
    saved = Counter(
        {i: sum(len(ids) - 1 for (_, j), ids in holders.items() if j == i and ids) for i in (0, 1)}
    )
    assert +shared.num_saved == +saved


def test_what_was_on_a_lost_instance_is_held_by_nobody() -> None:
    shared = SharedKV("a", striped("a", range(12), (0, 1)), HOLDERS)
    shared.lose(1)
    assert shared.held_by("b").tokens_by_instance() == {0: 6}
    assert shared.num_saved == {0: 12}
