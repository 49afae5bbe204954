"""The KV that a batch of `esp` reaches, by what instances do for others."""

from collections import Counter
from dataclasses import replace

import pytest
from machines import H200
from plans import decode
from snapshots import decoding, running, snapshot_of, waiting

from loong.core.instance import MAX_SERVED_LISTS, Service
from loong.core.placement import BorrowedKV, striped
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.service import can_reach, leased
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.policy import plan_esp


def serving(snapshot: Snapshot, serves: Service, max_served_leases: int = 1) -> Snapshot:
    changed = (replace(i, serves=serves, max_served_leases=max_served_leases) for i in snapshot.instances)
    return replace(snapshot, instances=tuple(changed))


@pytest.mark.parametrize(
    ("serves", "by_step", "by_lease"),
    [(Service.ALL, True, True), (Service.OWN_HOST, True, False), (Service.NONE, False, False)],
)
def test_kv_of_others_is_reached_if_they_serve_and_by_one_lease_alone_if_they_serve_one(
    serves: Service, by_step: bool, by_lease: bool
) -> None:
    inside, outside, served = (decoding(n, 9, ids) for n, ids in (("a", (0,)), ("b", (0, 1)), ("c", (1,))))
    lease = decode([served], (2,), {"c": 2}, num_steps=9)
    snapshot = serving(snapshot_of([99] * 3, [inside, outside, served], [running(0, lease)]), serves)
    holders = replace(snapshot.batches[0], holder_ids=(1,))
    snapshot = replace(snapshot, batches=(holders,))
    assert can_reach(snapshot, inside, (0,))
    assert can_reach(snapshot, outside, (0,)) == by_step
    assert can_reach(snapshot, outside, (0,), in_lease=True) == by_lease
    assert [view.request_id for view in leased(snapshot, [inside, outside], (0,))] == (
        ["a", "b"] if by_lease else ["a"]
    )


def test_leases_planned_at_once_count_as_those_that_are_served() -> None:
    views = [decoding("a", 9, (0, 1)), decoding("b", 9, (0,))]
    snapshot = serving(snapshot_of([99] * 2, views), Service.OWN_HOST, max_served_leases=2)
    assert leased(snapshot, views, (0,), {1: 1}) == views
    assert leased(snapshot, views, (0,), {1: 2}) == views[1:]


def test_a_lease_has_as_many_choices_as_the_lists_of_those_that_serve_it_hold() -> None:
    def choice(number: int) -> RequestView:
        view = decoding(f"a-{number}", 900, (1,), num_output=2)
        return replace(view, borrowed=(BorrowedKV("kv", striped("a", range(900), (1,))),))

    views = [choice(number) for number in range(4 * MAX_SERVED_LISTS)]
    snapshot = serving(snapshot_of([1000] * 2, views), Service.OWN_HOST)
    found = leased(snapshot, views, (0,))
    listed = sum((Counter(view.placement.tokens_by_instance()) for view in found), Counter[int]())
    assert found == views[: len(found)]
    assert 0 < listed[1] <= (MAX_SERVED_LISTS - 1) * 1000 < listed[1] + views[0].placement.num_tokens


def test_a_prompt_that_only_all_instances_have_room_for_is_computed_by_all() -> None:
    views = [decoding("d", 100, (1,)), waiting("p", 25_000)]
    (batch,) = plan_esp(snapshot_of([20_000] * 2, views), H200, PolicyConfig()).batches
    assert batch.group.instance_ids == (0, 1)
    assert {block.master_id for block in batch.blocks_of("p")} == {0, 1}
