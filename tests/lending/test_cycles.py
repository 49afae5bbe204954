"""Swaps of debts along cycles (DGFM), beside a brute force over all cycles of five instances."""

from collections import Counter
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from loong.lending.cycles import swaps, widest_cycle

edges = st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(lambda edge: edge[0] != edge[1])
graphs = st.dictionaries(edges, st.integers(1, 20), max_size=20)


def widest_by_brute_force(debts: dict[tuple[int, int], int]) -> int:
    """Return the largest least debt of all cycles; 0 if there is none."""
    best = 0
    for length in range(2, 6):
        for cycle in permutations(range(5), length):
            if cycle[0] == min(cycle):
                following = (*cycle[1:], cycle[0])
                best = max(best, min(debts.get(edge, 0) for edge in zip(cycle, following, strict=True)))
    return best


@given(debts=graphs, least=st.integers(1, 6))
def test_the_widest_cycle_is_that_of_a_brute_force(debts: dict[tuple[int, int], int], least: int) -> None:
    widest = widest_by_brute_force(debts)
    found = widest_cycle(debts, least)
    assert (found.num_blocks if found else 0) == (widest if widest >= least else 0)


@given(debts=graphs, least=st.integers(1, 6))
def test_swaps_leave_no_cycle_and_what_each_instance_uses(
    debts: dict[tuple[int, int], int], least: int
) -> None:
    left, net = Counter(debts), Counter[int]()
    for swap in swaps(debts, least):
        assert swap.num_blocks >= least
        assert len(set(swap.instance_ids)) == len(swap.instance_ids) >= 2
        for debtor_id, creditor_id in swap.edges:
            left[debtor_id, creditor_id] -= swap.num_blocks
            net[debtor_id] += swap.num_blocks
            net[creditor_id] -= swap.num_blocks
    assert min(left.values(), default=0) >= 0
    assert not any(net.values())
    assert widest_by_brute_force(dict(left)) < least


def test_the_largest_swap_comes_first() -> None:
    debts = {(0, 1): 9, (1, 2): 7, (2, 0): 8, (0, 3): 3, (3, 0): 3, (1, 0): 2}
    assert [(swap.instance_ids, swap.num_blocks) for swap in swaps(debts, 3)] == [((0, 1, 2), 7), ((0, 3), 3)]
