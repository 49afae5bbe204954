"""Groups of readers cover what several read, each key once, and are nested as a tree of prefixes."""

from collections import Counter
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from loong.core.placement import KVSegment, Placement
from loong.core.shared_kv import MAX_LEVELS, SharedReads, num_saved_keys, shared_reads


@st.composite
def trees(draw: st.DrawFn) -> list[list[KVSegment]]:
    """Draw readers of a tree of nodes, each up to any place of the last node on its path."""
    num_levels, step = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    readers = []
    for _ in range(draw(st.integers(1, 12))):
        path, start = "kv", 0
        segments = []
        for _ in range(draw(st.integers(0, num_levels))):
            path += draw(st.sampled_from("ab"))
            stop = start + 12 if draw(st.booleans()) else start + draw(st.integers(1, 12))
            if positions := range(start, stop, step):
                segments.append(KVSegment(path, positions, 0))
            if stop != start + 12:
                break
            start = stop
        readers.append(segments)
    return readers


def keys_of(segments: list[KVSegment]) -> set[tuple[str, int]]:
    return {(s.owner_id, p) for s in segments for p in s.positions}


def groups_of(reads: SharedReads) -> list[tuple[int, set[int], set[int]]]:
    return [
        (g.level, {reads.order[place] for place in g.readers}, {p for r in g.positions for p in r})
        for g in reads.groups
    ]


@given(trees())
def test_groups_are_nested_and_read_what_all_their_readers_have(readers: list[list[KVSegment]]) -> None:
    reads = shared_reads(readers)
    groups = groups_of(reads)
    assert len(set(reads.order)) == len(reads.order)
    for level, members, positions in groups:
        assert len(members) > 1
        assert level < MAX_LEVELS
        assert sum(len(r) for g in reads.groups if g.level == level for r in [g.readers]) <= len(reads.order)
        owners = [{o for o, p in keys_of(readers[m]) if p in positions} for m in members]
        assert all(them == owners[0] for them in owners)
        assert all(positions <= {p for _, p in keys_of(readers[m])} for m in members)
    for (_, a, p), (_, b, q) in combinations(groups, 2):
        assert not a & b or (a <= b or b <= a)
        assert not (a & b and p & q), "a reader has a key twice"


@given(trees())
def test_up_to_four_levels_all_that_is_shared_is_read_once(readers: list[list[KVSegment]]) -> None:
    reads = shared_reads(readers)
    if reads.num_levels < MAX_LEVELS:
        counts = Counter(key for segments in readers for key in keys_of(segments))
        assert reads.num_saved == sum(count - 1 for count in counts.values())
        assert num_saved_keys(readers, 1) == reads.num_saved
    assert num_saved_keys(readers, reads.num_saved + 1) == 0
    assert num_saved_keys(readers, None) == 0


def test_many_ways_to_read_an_owner_make_one_group_of_what_all_read() -> None:
    readers = [[KVSegment("kv", range(100 + i), 0)] for i in range(40)]
    reads = shared_reads(readers)
    (group,) = reads.groups
    assert (len(group.readers), group.positions) == (40, (range(100),))


def test_shared_parts_follow_the_changes_of_a_placement() -> None:
    shared = (KVSegment("kv", range(8), 0), KVSegment("kv", range(8, 12), 1))
    whole = Placement((KVSegment("r", range(10), 0), KVSegment("r", range(10, 12), 1))).sharing(shared)
    assert whole.adding([KVSegment("r", range(12, 13), 0)]).shared == shared
    assert whole.removing(KVSegment("r", range(6, 10), 0)).shared == (KVSegment("kv", range(6), 0), shared[1])
    assert whole.without(0).shared == shared[1:]
    assert whole.of("s").shared == ()
