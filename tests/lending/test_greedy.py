"""Algorithm 1 of Infinite-LLM, beside an exhaustive search on tiny clusters."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product

from hypothesis import given
from hypothesis import strategies as st

from loong.lending.greedy import (
    InstanceLoad,
    Thresholds,
    is_return_better,
    num_hidden,
    pair_rate,
    propose,
)

ALL = Thresholds(batch_size=100, memory_share=1.0)


@dataclass(frozen=True)
class Linear:
    """Equation (5) with constant times; a creditor's answer hides behind as many blocks as it reads."""

    fixed: float = 8.0
    request: float = 0.1
    block: float = 1.0

    def seconds(self, batch_size: int, num_blocks: int, /) -> float:
        return self.fixed + self.request * batch_size + self.block * num_blocks

    def is_hidden(self, batch_size: int, num_local: int, num_remote: int, /) -> bool:
        return num_remote <= num_local


def load(instance_id: int, batch_size: int, num_used: int, capacity: int, longest: int = 0) -> InstanceLoad:
    return InstanceLoad(
        instance_id,
        batch_size,
        num_used,
        capacity - num_used,
        num_used,
        capacity,
        f"r{instance_id}" if longest else None,
        longest,
    )


@st.composite
def tiny_clusters(draw: st.DrawFn) -> list[InstanceLoad]:
    capacity = 8
    loads = []
    for instance_id in range(draw(st.integers(2, 4))):
        num_used = draw(st.integers(0, capacity))
        batch_size = draw(st.integers(1, 4)) if num_used else 0
        loads.append(load(instance_id, batch_size, num_used, capacity, draw(st.integers(0, num_used))))
    return loads


waits = st.lists(st.integers(1, 4), max_size=3)


def after(loads: Sequence[InstanceLoad], moves: Sequence[tuple[int, int, int]]) -> list[InstanceLoad]:
    by_id = {load.instance_id: load for load in loads}
    for debtor_id, creditor_id, num_blocks in moves:
        if num_blocks:
            by_id[debtor_id] = by_id[debtor_id].lending_to(creditor_id, num_blocks)
            by_id[creditor_id] = by_id[creditor_id].hosting(num_blocks)
    return list(by_id.values())


def best_of_pair(debtor: InstanceLoad, creditor: InstanceLoad, waiting: Sequence[int]) -> float:
    most = num_hidden(debtor, creditor.instance_id, min(debtor.num_longest, creditor.num_room), Linear())
    stops = list(accumulate(waiting))
    return max(
        pair_rate(
            debtor.lending_to(creditor.instance_id, num) if num else debtor,
            creditor.hosting(num) if num else creditor,
            stops,
            Linear(),
        )
        for num in range(most + 1)
    )


@given(loads=tiny_clusters(), waiting=waits)
def test_no_proposal_makes_its_pair_slower_or_breaks_a_bound(
    loads: list[InstanceLoad], waiting: list[int]
) -> None:
    by_id = {load.instance_id: load for load in loads}
    debtors, creditors = set[int](), set[int]()
    for found in propose(loads, waiting, Linear(), ALL):
        assert found.rate > found.was
        debtor, creditor = by_id[found.debtor_id], by_id[found.creditor_id]
        assert 0 < found.num_blocks <= min(debtor.num_longest, creditor.num_room)
        by_id[found.debtor_id] = moved = debtor.lending_to(found.creditor_id, found.num_blocks)
        by_id[found.creditor_id] = creditor.hosting(found.num_blocks)
        assert Linear().is_hidden(moved.batch_size, moved.num_keys, max(moved.lent.values()))
        debtors.add(found.debtor_id)
        creditors.add(found.creditor_id)
    assert debtors.isdisjoint(creditors)


@given(
    batches=st.tuples(st.integers(1, 4), st.integers(0, 4)),
    used=st.tuples(st.integers(1, 30), st.integers(0, 30)),
    waiting=st.lists(st.integers(1, 12), max_size=6),
)
def test_of_one_debtor_and_one_creditor_it_finds_nearly_the_best_number_of_all(
    batches: tuple[int, int], used: tuple[int, int], waiting: list[int]
) -> None:
    debtor = load(0, batches[0], used[0], 30, used[0])
    creditor = load(1, batches[1] if used[1] else 0, used[1], 30)
    found = propose([debtor, creditor], waiting, Linear(), ALL)
    rate = found[0].rate if found else pair_rate(debtor, creditor, list(accumulate(waiting)), Linear())
    assert rate >= 0.97 * best_of_pair(debtor, creditor, waiting)


def test_the_greedy_choice_is_near_the_exhaustive_one_on_tiny_clusters() -> None:
    """Two debtors and two creditors, with all placements of their blocks; nobody waits."""
    model, shares = Linear(), list[float]()
    for used in product((4, 8), (2, 6), (0, 2), (0, 4)):
        loads = [load(i, 1 + (i > 1) * 2 if n else 0, n, 8, n if i < 2 else 0) for i, n in enumerate(used)]
        moves = [(p.debtor_id, p.creditor_id, p.num_blocks) for p in propose(loads, (), model, ALL)]
        optimum = max(
            total_rate(placed)
            for nums in product(range(5), repeat=4)
            if is_allowed(placed := after(loads, tuple(zip((0, 0, 1, 1), (2, 3, 2, 3), nums, strict=True))))
        )
        rate = total_rate(after(loads, moves))
        assert rate >= total_rate(loads) - 1e-12
        shares.append(rate / optimum)
    assert max(shares) <= 1 + 1e-12
    assert min(shares) >= 0.9


def total_rate(loads: Sequence[InstanceLoad]) -> float:
    return sum(x.batch_size / Linear().seconds(x.batch_size, x.num_keys) for x in loads)


def is_allowed(loads: Sequence[InstanceLoad]) -> bool:
    return all(
        x.num_room >= 0
        and x.num_longest >= 0
        and all(Linear().is_hidden(x.batch_size, x.num_keys, n) for n in x.lent.values())
        for x in loads
    )


def test_figure_5_two_long_requests_lend_out_and_the_short_ones_keep() -> None:
    """Instance 0 is full of one long request, 3 has a long one and some room, 1 and 2 have short ones."""
    loads = [
        load(0, 1, 100, 100, 100),
        load(1, 20, 20, 100, 2),
        load(2, 25, 25, 100, 2),
        load(3, 4, 70, 100, 60),
    ]
    found = propose(loads, [5] * 30, Linear(block=0.05), Thresholds(10, 0.5))
    assert {p.debtor_id for p in found} == {0, 3}
    assert {p.creditor_id for p in found} == {1, 2}
    assert found[0].request_id == "r0"  # the smaller batch comes first


def test_large_batches_borrow_nothing_and_full_memories_lend_nothing() -> None:
    debtor, creditor = loads = [load(0, 1, 100, 100, 100), load(1, 20, 20, 100)]
    model, thresholds = Linear(block=0.05), Thresholds(10, 0.5)
    assert propose(loads, [5] * 9, model, thresholds)
    assert not propose([replace(debtor, batch_size=11), creditor], [5] * 9, model, thresholds)
    assert not propose([debtor, replace(creditor, num_used=51)], [5] * 9, model, thresholds)


def test_kv_comes_back_if_that_makes_no_fewer_tokens() -> None:
    debtor, busy = replace(load(0, 4, 30, 100), lent={1: 20}), replace(load(1, 4, 40, 100), num_hosted=20)
    assert is_return_better(debtor, busy, 20, Linear())
    idle = replace(load(1, 0, 20, 100), num_hosted=20)
    assert not is_return_better(debtor, idle, 20, Linear())
