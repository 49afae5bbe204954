"""Accounting that does not balance is refused, with the error in it."""

from collections.abc import Callable

import numpy as np
import pytest

from loong.core.errors import InvalidEventError
from loong.core.instance import ElasticInstance, ESPGroup, InstanceKind
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan, KVMigration, QueryBlock, Transfer
from loong.core.request import Request, SamplingParams
from loong.state.accounting import Accounting
from loong.state.check_state import check_accounting
from loong.state.owners import KVOwner


def segment(request_id: str, positions: range, instance_id: int = 0) -> KVSegment:
    return KVSegment(request_id, positions, instance_id)


def new_owner(accounting: Accounting, salt: str) -> KVOwner:
    """Make an owner of two tokens."""
    return accounting.requests.owners.path(salt, np.arange(2, dtype=np.int32))[0].owner


def balanced() -> Accounting:
    """Two instances; b is in a batch, r has KV that migrates, w waits with a sibling, and s borrows KV."""
    accounting = Accounting()
    for instance_id in range(2):
        accounting.pools.join(ElasticInstance(instance_id, 1, InstanceKind.FULL, 20))
    for request_id, num_choices in ("b", 1), ("r", 1), ("w", 2), ("s", 1):
        accounting.requests.arrive(
            Request(request_id, range(4), SamplingParams(), arrival_time=0.0, num_choices=num_choices)
        )
    block = QueryBlock("b", range(4), 1, Transfer.KV)
    plan = BatchPlan(ESPGroup((1,)), (block,), (segment("b", range(4), 1),))
    accounting.flights.open_batch(1, plan, accounting.snapshot(0.0, 0))
    held = segment("r", range(3))
    accounting.requests.changing("r").placement = Placement((held,))
    borrower = accounting.requests.changing("s")
    borrower.placement = Placement((segment("s", range(2)),))
    owner = new_owner(accounting, "s")
    accounting.requests.owners.give(owner, "s", borrower.placement.segments)
    borrower.borrow(owner)
    accounting.pools.reserve({0: 3 + 2})
    accounting.flights.open_migration(2, KVMigration(held, 1))
    accounting.snapshot(0.0, 0)
    return accounting


def test_accounting_that_balance_pass() -> None:
    check_accounting(balanced())


def end(accounting: Accounting) -> None:
    accounting.requests.changing("w").has_ended = True


def lose_a_view(accounting: Accounting) -> None:
    accounting.requests.by_id["w"].batch_id = 1


def name_no_end(accounting: Accounting) -> None:
    accounting.requests.changing("w").ending_id = 1


def take_two_slots(accounting: Accounting) -> None:
    accounting.requests.changing("w").placement = Placement(
        (segment("w", range(2)), segment("w", range(1, 2), 1))
    )


def compute_all(accounting: Accounting) -> None:
    accounting.requests.changing("w").placement = Placement((segment("w", range(4)),))


def leave_its_instance(accounting: Accounting) -> None:
    accounting.pools.instances[1] = accounting.pools.instances[1].running(None)


def read_kv_elsewhere(accounting: Accounting) -> None:
    accounting.requests.changing("b").placement = Placement((segment("b", range(1)),))


def lose_its_instance(accounting: Accounting) -> None:
    del accounting.pools.instances[1]


def leave_its_batch(accounting: Accounting) -> None:
    accounting.requests.changing("b").batch_id = None


def lose_its_request(accounting: Accounting) -> None:
    accounting.requests.views.drop(accounting.requests.by_id.pop("b"))


def forget_its_migration(accounting: Accounting) -> None:
    accounting.requests.changing("r").migration_ids.clear()


def reserve_too_much(accounting: Accounting) -> None:
    accounting.pools.reserve({0: 1})


def shrink_the_pool(accounting: Accounting) -> None:
    accounting.pools.instances[0] = ElasticInstance(0, 1, InstanceKind.FULL, kv_capacity=2, kv_used=3)


def hold_kv_nowhere(accounting: Accounting) -> None:
    accounting.requests.changing("w").placement = Placement((segment("w", range(1), 7),))


def forget_a_fork(accounting: Accounting) -> None:
    accounting.requests.by_id["w"].unstarted = []


def wait_for_another(accounting: Accounting) -> None:
    accounting.requests.changing("r").unstarted = accounting.requests.by_id["w"].unstarted


def lend_to_nobody(accounting: Accounting) -> None:
    accounting.requests.owners.by_id["kv-1"].lend("gone", ())


def keep_an_owner_of_nothing(accounting: Accounting) -> None:
    new_owner(accounting, "another")


def borrow_what_is_not_there(accounting: Accounting) -> None:
    accounting.requests.owners.by_id["kv-1"].lend("s", (segment("kv-1", range(2, 3)),))


def borrow_what_is_not_read(accounting: Accounting) -> None:
    accounting.requests.changing("s").placement = Placement((segment("s", range(1)),))


def keep_what_nobody_reads(accounting: Accounting) -> None:
    accounting.requests.owners.by_id["kv-1"].give_back("s", (segment("s", range(1, 2)),))


def own_what_is_borrowed(accounting: Accounting) -> None:
    owner = accounting.requests.owners.by_id["kv-1"]
    accounting.requests.owners.leave(owner, "s")
    accounting.requests.changing("s").borrowed = ()


def cache_too_much(accounting: Accounting) -> None:
    accounting.pools.keep({0: 1})


def overfill_the_pool(accounting: Accounting) -> None:
    accounting.pools.instances[0] = ElasticInstance(0, 1, InstanceKind.FULL, kv_capacity=4, kv_used=5)


def cache_kv_nowhere(accounting: Accounting) -> None:
    accounting.requests.owners.keeps = True
    owner = new_owner(accounting, "another")
    owner.add((segment("another", range(2), 7),))


def forget_that_a_slot_is_free(accounting: Accounting) -> None:
    accounting.pools.free[0] -= 1


def count_a_slot_twice(accounting: Accounting) -> None:
    accounting.pools.pools[0] += 1


def expect_shorter_requests(accounting: Accounting) -> None:
    accounting.requests.most_tokens -= 1


def miscount(accounting: Accounting) -> None:
    accounting.counts.add(num_arrived=1)


@pytest.mark.parametrize(
    ("upset", "message"),
    [
        (end, "request w has ended but keeps its KV"),
        (name_no_end, "in batches that are ending, but they name"),
        (lose_a_view, "are not those of the live requests"),
        (take_two_slots, r"positions range\(1, 2\) of request w are in two slots"),
        (compute_all, "request w is not in flight with nothing to compute"),
        (leave_its_instance, "instance_id=1.* does not fit the batches"),
        (lose_its_instance, r"batches run on instances \[1\], which do not exist"),
        (read_kv_elsewhere, r"batch 1 reads KV on instances \(0,\), but began with holders \(\)"),
        (leave_its_batch, "request b says it is in batch None"),
        (lose_its_request, r"batches run requests \['b'\], which are not live"),
        (forget_its_migration, r"migrations \[\(2, 'r'\)\] are in flight, but requests name \[\]"),
        (reserve_too_much, "instance_id=0.* does not use what its requests and owners have there"),
        (shrink_the_pool, "instance_id=0.* does not use what"),
        (hold_kv_nowhere, r"KV is on instances \[7\], which do not exist"),
        (forget_a_fork, "choice w is to start with w-1, but does not know"),
        (wait_for_another, "choice r waits for others, which do not know"),
        (lend_to_nobody, r"borrow from owners \[\('kv-1', 's'\)\], whose users are .*'gone'"),
        (keep_an_owner_of_nothing, "owner kv-2 has nothing"),
        (borrow_what_is_not_there, r"request s reads .*range\(2, 3\).*: not there"),
        (borrow_what_is_not_read, r"request s borrows .*range\(0, 2\).*, but does not read it"),
        (keep_what_nobody_reads, r"owner kv-1 keeps \(range\(1, 2\),\), which nobody reads"),
        (own_what_is_borrowed, "instance_id=0.* does not use what its requests and owners have there"),
        (cache_too_much, "kv_cached=1.* does not use what its requests and owners have there"),
        (overfill_the_pool, "instance_id=0.* has more than it has room for"),
        (cache_kv_nowhere, r"KV is on instances \[7\], which do not exist"),
        (forget_that_a_slot_is_free, "are not those that are free of"),
        (count_a_slot_twice, "the pools .* are not those of"),
        (expect_shorter_requests, "no request comes to more than 33 tokens, but w does"),
        (miscount, "num_arrived=6.* does not fit 5 live requests"),
    ],
)
def test_accounting_that_do_not_balance_are_refused(
    upset: Callable[[Accounting], None], message: str
) -> None:
    accounting = balanced()
    upset(accounting)
    with pytest.raises(InvalidEventError, match=message):
        check_accounting(accounting)
