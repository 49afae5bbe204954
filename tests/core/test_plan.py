from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from loong.core.instance import ESPGroup
from loong.core.placement import KVSegment
from loong.core.plan import BatchPlan, QueryBlock, Transfer

GROUP = ESPGroup((1, 0))


def block(request_id: str, positions: range, master_id: int) -> QueryBlock:
    return QueryBlock(request_id, positions, master_id, Transfer.QUERY)


LEASE = BatchPlan(
    GROUP,
    (block("a", range(5, 6), 1), block("b", range(9, 10), 0)),
    (KVSegment("a", range(5, 13), 1), KVSegment("b", range(9, 12), 0)),
    num_steps=8,
)


def test_a_step_of_a_lease_is_one_token_of_each_request_that_has_not_left() -> None:
    assert LEASE.at_step(3, ["a"]) == BatchPlan(
        GROUP, (block("a", range(8, 9), 1),), (KVSegment("a", range(8, 9), 1),)
    )
    assert LEASE.at_step(0, ["b", "a"]).queries == LEASE.queries


def test_a_batch_for_some_of_its_requests_has_their_parts_alone() -> None:
    assert LEASE.only_for(["b", "c"]) == BatchPlan(GROUP, LEASE.queries[1:], LEASE.writes[1:], num_steps=8)
    timed = replace(LEASE, predicted_time=0.5)
    assert timed.only_for(["b", "a"]) == timed


def test_a_batch_finds_what_it_has_of_a_request_and_what_each_instance_is_to_store() -> None:
    queries = (block("b", range(2), 1), block("a", range(3, 5), 0), block("b", range(2, 4), 0))
    writes = (KVSegment("b", range(4), 1), KVSegment("a", range(3, 4), 0), KVSegment("a", range(4, 5), 1))
    batch = BatchPlan(GROUP, queries, writes)
    assert batch.request_ids == ("b", "a")
    assert batch.blocks_of("b") == (queries[0], queries[2])
    assert batch.writes_of("a") == writes[1:]
    assert (batch.blocks_of("c"), batch.writes_of("c")) == ((), ())
    assert batch.num_stored_tokens == {1: 5, 0: 1}
    assert batch.num_written_tokens == {"b": 4, "a": 2}


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 5))
def test_micro_batches_have_each_request_once_and_like_shares_of_every_master(
    masters: list[int], number: int
) -> None:
    lease = lease_of(masters, number)
    parts = lease.micro_batches
    assert len(parts) == min(number, len(masters))
    assert max(len(p.request_ids) for p in parts) - min(len(p.request_ids) for p in parts) <= 1
    for master_id in set(masters):
        own = [b.request_id for part in parts for b in part.queries if b.master_id == master_id]
        assert own == [b.request_id for b in lease.queries if b.master_id == master_id]
    even = lease_of([0, 1, 2] * 2 * number, number).micro_batches
    assert all(sorted(b.master_id for b in part.queries) == [0, 0, 1, 1, 2, 2] for part in even)


def lease_of(masters: list[int], num_micro_batches: int) -> BatchPlan:
    queries = tuple(QueryBlock(f"r{i}", range(5, 6), m, Transfer.QUERY) for i, m in enumerate(masters))
    writes = tuple(KVSegment(b.request_id, range(5, 8), b.master_id) for b in queries)
    return BatchPlan(ESPGroup((0, 1, 2, 3)), queries, writes, 3, num_micro_batches=num_micro_batches)
