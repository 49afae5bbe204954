"""Books that do not balance are refused, with what is wrong in them."""

from collections.abc import Callable

import pytest

from loong.core.books import Books
from loong.core.check_books import check_books
from loong.core.errors import InvalidEventError
from loong.core.instance import ElasticInstance, ESPGroup, InstanceKind
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan, KVMigration, QueryBlock, Transfer
from loong.core.records import InFlightBatch, LiveRequest
from loong.core.request import Request, SamplingParams
from loong.core.shared_kv import SharedKV
from loong.core.snapshot import RunningBatch


def segment(request_id: str, positions: range, instance_id: int = 0) -> KVSegment:
    return KVSegment(request_id, positions, instance_id)


def balanced() -> Books:
    """Two instances; request b is in a batch, r has KV that migrates, and w waits with a fork."""
    books = Books()
    for instance_id in range(2):
        books.join(ElasticInstance(instance_id, 1, InstanceKind.FULL, 20))
    for request_id, num_forks in ("b", 0), ("r", 0), ("w", 1):
        first, *others = Request(
            request_id, range(4), SamplingParams(), 0.0, num_choices=1 + num_forks
        ).choices()
        leader = LiveRequest(first)
        leader.forks = [LiveRequest(choice, leader=leader) for choice in others]
        books.admit(leader)
    block = QueryBlock("b", range(4), 1, Transfer.KV)
    plan = BatchPlan(ESPGroup((1,)), (block,), (segment("b", range(4), 1),))
    books.open_batch(InFlightBatch(RunningBatch(1, plan, 0.0, 0, 1, 0.0), {}))
    held = segment("r", range(3))
    books.changing("r").placement = Placement((held,))
    books.reserve({0: 3})
    books.open_migration(2, KVMigration(held, 1))
    return books


def test_books_that_balance_pass() -> None:
    check_books(balanced())


def end(books: Books) -> None:
    books.changing("w").has_ended = True


def lose_a_view(books: Books) -> None:
    books.snapshot(0.0, 0)
    books.requests["w"].batch_id = 1


def name_no_end(books: Books) -> None:
    books.changing("w").ending_id = 1


def take_two_slots(books: Books) -> None:
    books.changing("w").placement = Placement((segment("w", range(2)), segment("w", range(1, 2), 1)))


def compute_all(books: Books) -> None:
    books.changing("w").placement = Placement((segment("w", range(4)),))


def leave_its_instance(books: Books) -> None:
    books.instances[1] = books.instances[1].running(None)


def lose_its_instance(books: Books) -> None:
    del books.instances[1]


def leave_its_batch(books: Books) -> None:
    books.changing("b").batch_id = None


def lose_its_request(books: Books) -> None:
    books.roll.drop(books.requests.pop("b"))


def forget_its_migration(books: Books) -> None:
    books.changing("r").migration_ids.clear()


def reserve_too_much(books: Books) -> None:
    books.reserve({0: 1})


def shrink_the_pool(books: Books) -> None:
    books.instances[0] = ElasticInstance(0, 1, InstanceKind.FULL, kv_capacity=2, kv_used=3)


def hold_kv_nowhere(books: Books) -> None:
    books.changing("w").placement = Placement((segment("w", range(1), 7),))


def forget_a_fork(books: Books) -> None:
    books.requests["w"].forks.clear()


def wait_for_another(books: Books) -> None:
    books.requests["w-1"].leader = books.requests["r"]


def share_with_nobody(books: Books) -> None:
    books.changing("r").shared = SharedKV("r", Placement((segment("r", range(1)),)), ("r", "gone"))


def share_what_is_not_held(books: Books) -> None:
    books.changing("r").shared = SharedKV("r", Placement((segment("r", range(9)),)), ("r", "b"))


def forget_that_a_slot_is_free(books: Books) -> None:
    books.free[0] -= 1


def count_a_slot_twice(books: Books) -> None:
    books.pools[0] += 1


def expect_shorter_requests(books: Books) -> None:
    books.most_tokens -= 1


def miscount(books: Books) -> None:
    books.count(num_arrived=1)


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
        (leave_its_batch, "request b says it is in batch None"),
        (lose_its_request, r"batches run requests \['b'\], which are not live"),
        (forget_its_migration, r"migrations \[\(2, 'r'\)\] are in flight, but requests name \[\]"),
        (reserve_too_much, "instance_id=0.* does not use what its requests have there"),
        (shrink_the_pool, "instance_id=0.* does not use what"),
        (hold_kv_nowhere, r"KV is on instances \[7\], which do not exist"),
        (forget_a_fork, "request w-1 waits for .*request_id='w'.*, which does not know"),
        (wait_for_another, "waits for w, but not it alone"),
        (share_with_nobody, r"requests \['gone'\] share KV, but are not live"),
        (share_what_is_not_held, r"request r shares .*range\(0, 9\).*, but does not hold it"),
        (forget_that_a_slot_is_free, "are not those that are free of"),
        (count_a_slot_twice, "the pools .* are not those of"),
        (expect_shorter_requests, "no request comes to more than 33 tokens, but w does"),
        (miscount, "num_arrived=5.* does not fit 4 live requests"),
    ],
)
def test_books_that_do_not_balance_are_refused(upset: Callable[[Books], None], message: str) -> None:
    books = balanced()
    upset(books)
    with pytest.raises(InvalidEventError, match=message):
        check_books(books)
