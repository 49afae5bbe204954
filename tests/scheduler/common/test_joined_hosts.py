"""Hosts are one part where a request needs several of them, and only there."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from plans import decode, prefill
from snapshots import begun, decoding, running, snapshot_of, waiting

from loong.core.instance import ElasticInstance, InstanceKind, spread_over_hosts
from loong.core.snapshot import Snapshot
from loong.scheduler.common.joined_hosts import joined_hosts

POOL, NUM_HOSTS = 1000, 4


def on_hosts(snapshot: Snapshot, num_hosts: int = NUM_HOSTS) -> Snapshot:
    host_ids = spread_over_hosts(len(snapshot.instances), num_hosts)
    instances = tuple(replace(i, host_id=host_ids[i.instance_id]) for i in snapshot.instances)
    return replace(snapshot, instances=instances)


HOLDERS = st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True).map(tuple)


@given(st.lists(st.tuples(HOLDERS, st.integers(1, 200)), max_size=4), st.lists(st.integers(10, 9000)))
def test_each_instance_is_in_one_part_and_each_request_in_a_part_that_can_hold_it(
    held: list[tuple[tuple[int, ...], int]], lengths: list[int]
) -> None:
    decodes = [decoding(f"d{n}", 30, holders, num_left) for n, (holders, num_left) in enumerate(held)]
    prompts = [waiting(f"w{n}", length) for n, length in enumerate(lengths)]
    snapshot = on_hosts(snapshot_of([POOL] * 8, [*decodes, *prompts]))
    parts = joined_hosts(snapshot)
    assert sorted(i for part in parts for i in part) == list(range(8))
    assert all(len({i // 2 for i in part}) * 2 == len(part) for part in parts)
    largest = max(POOL * len(part) for part in parts)
    for view in prompts:
        assert view.num_final_tokens <= largest or len(parts) == 1
    for view in decodes:
        (part,) = (part for part in parts if not set(part).isdisjoint(view.placement.instance_ids))
        assert set(view.placement.instance_ids) <= set(part)


def test_hosts_are_joined_by_kv_by_a_batch_and_by_a_prompt_of_more_than_one() -> None:
    alone = ((0, 1), (2, 3), (4, 5), (6, 7))
    near, far = decoding("near", 30, (2, 3), 9), decoding("far", 30, (1, 6), 9)
    assert joined_hosts(on_hosts(snapshot_of([POOL] * 8, [near]))) == alone
    assert joined_hosts(on_hosts(snapshot_of([POOL] * 8, [near, far]))) == ((0, 1, 6, 7), (2, 3), (4, 5))
    long = waiting("long", 2 * POOL + 1)
    assert joined_hosts(on_hosts(snapshot_of([POOL] * 8, [near, long]))) == ((0, 1, 2, 3), (4, 5), (6, 7))
    assert joined_hosts(on_hosts(snapshot_of([POOL] * 8, [far, long]))) == ((0, 1, 6, 7), (2, 3), (4, 5))
    served = running(7, decode([near], (6,), {"near": 6}))
    assert joined_hosts(on_hosts(snapshot_of([POOL] * 8, [near], [served]))) == ((0, 1), (2, 3, 6, 7), (4, 5))
    own = running(7, prefill([near], (3, 4)))
    assert joined_hosts(on_hosts(snapshot_of([POOL] * 8, [near], [own]))) == ((0, 1), (2, 3, 4, 5), (6, 7))
    ending = replace(snapshot_of([POOL] * 8, [near]), ending=(own,))
    assert joined_hosts(on_hosts(ending)) == ((0, 1), (2, 3, 4, 5), (6, 7))


def test_a_request_with_kv_on_a_host_tier_alone_extends_the_largest_part() -> None:
    tier = ElasticInstance(8, 1, InstanceKind.HOST, POOL, kv_used=30)
    snapshot = on_hosts(snapshot_of([POOL] * 8, [begun("offloaded", 2 * POOL + 1, 30, (8,))]))
    snapshot = replace(snapshot, instances=(*snapshot.instances, tier))
    assert joined_hosts(snapshot) == ((0, 1, 2, 3), (4, 5), (6, 7))
