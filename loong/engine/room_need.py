"""The room that an engine lacks, and the room that it can lend, by what its requests are admitted with."""

from collections.abc import Iterator, Sequence

from loong.core.placement import InstanceId
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import Snapshot
from loong.lending.engine_room import BLOCK_TOKENS, RoomNeed, blocks_of
from loong.scheduler.common.future_kv import FutureKV
from loong.scheduler.common.request_lengths import Lengths

KEPT_SHARE = 0.25  # of a pool, which is not lent: as much as `esp` keeps free where it can
LOAN_SHARE = 0.25  # of the pools of a debtor, which it asks for at least
LEAST_SHARE = 0.125  # of them, below which a loan is not worth its processes
LEAST_LOAN = 64  # tokens, the same


def most_loan(kv_capacity: int) -> int:
    """Return the tokens that an instance of this capacity lends at most."""
    return (kv_capacity - round(KEPT_SHARE * kv_capacity)) // BLOCK_TOKENS * BLOCK_TOKENS


def own_tokens(snapshot: Snapshot) -> int:
    """Return the tokens of the engine's own instances that are in use, or will be."""
    used = sum(snapshot.instance[i].kv_used for i in snapshot.pools)
    return min(used + _tokens_to_come(_fitting(snapshot)), sum(snapshot.pools.values()))


def room_need(snapshot: Snapshot, num_coming: int = 0) -> RoomNeed | None:
    """Return the loan that live requests need, besides loans of `num_coming` tokens; None if they need none.

    The oldest request that does not fit into the engine's own room and what it borrows comes first. One loan
    must do for it: engines that each had a part of what they need would wait for each other.
    """
    pools = sum(snapshot.pools.values())
    if found := oversized(snapshot, num_coming):
        oldest = min(found, key=lambda view: (view.arrival_time, view.request_id))
        least = _whole_blocks(oldest.num_final_tokens - pools - sum(snapshot.lent.values()))
        return RoomNeed(_loan_of(snapshot, least), least, max(0.0, snapshot.now - oldest.arrival_time))
    lacking = lacking_tokens(snapshot) - num_coming
    least = _whole_blocks(max(LEAST_LOAN, round(LEAST_SHARE * pools)))
    return RoomNeed(_loan_of(snapshot, lacking), least) if lacking > 0 else None


def lacking_tokens(snapshot: Snapshot) -> int:
    """Return the tokens of room that live requests lack for all to be admitted, of those that ever fit."""
    peak = FutureKV.of(Lengths.of(_fitting(snapshot))).peak
    return max(0, peak - sum(snapshot.pools.values()) - sum(snapshot.memory_pools.values()))


def oversized(snapshot: Snapshot, num_coming: int = 0) -> Sequence[RequestView]:
    """Return the requests that do not fit into the engine's own room and what it borrows, as a whole."""
    own = sum(snapshot.pools.values()) + sum(snapshot.lent.values())
    room = own + sum(snapshot.memory_pools.values()) + num_coming
    return [view for view in _live(snapshot) if view.num_final_tokens > room]


def reclaimed_tokens(snapshot: Snapshot) -> int:
    """Return the tokens that the engine needs of those that it has lent.

    That is all if a request here waits for a loan: the engine that it would ask may be the debtor.
    """
    lent = sum(snapshot.lent.values())
    if oversized(snapshot):
        return lent
    longest = max((view.num_final_tokens for view in _live(snapshot)), default=0)
    room = sum(snapshot.pools.values()) + sum(snapshot.memory_pools.values())
    return min(lent, max(lacking_tokens(snapshot), longest - room))


def room_to_lend(snapshot: Snapshot, need: RoomNeed) -> tuple[InstanceId, int] | None:
    """Return the instance that can best lend what is needed, and how many tokens; None if none can.

    Some of each pool stays free, and so does what live requests need, whatever the engine borrows. An engine
    with a request that waits for a loan lends nothing, unless the other's has waited longer.
    """
    if not snapshot.pools:
        return None
    waited = [snapshot.now - view.arrival_time for view in oversized(snapshot)]
    if waited and (need.waited is None or max(waited) >= need.waited):
        return None
    spare = {i: snapshot.free[i] - round(KEPT_SHARE * pool) for i, pool in snapshot.pools.items()}
    most_free = max(spare, key=lambda i: (spare[i], i))
    in_all = sum(max(0, n) for n in spare.values()) - _tokens_to_come(_fitting(snapshot))
    lendable = min(need.num_tokens, spare[most_free], in_all) // BLOCK_TOKENS * BLOCK_TOKENS
    return None if lendable < max(need.least_tokens, LEAST_LOAN) else (most_free, lendable)


def is_needless(snapshot: Snapshot, instance_id: InstanceId) -> bool:
    """Return whether the own instances have room for all, with what a loan keeps, and some more."""
    instance, pools = snapshot.instance.get(instance_id), sum(snapshot.pools.values())
    if instance is None or instance.is_draining or sum(snapshot.free.values()) < instance.kv_used:
        return False
    peak = FutureKV.of(Lengths.of(_fitting(snapshot))).peak
    return pools - peak >= KEPT_SHARE * pools


def bound_ids(snapshot: Snapshot, instance_id: InstanceId) -> frozenset[RequestId]:
    """Return the requests with KV that fit only with a loan: they could not go on without it."""
    room = sum(snapshot.pools.values()) + sum(snapshot.memory_pools.values())
    room -= snapshot.memory_pools.get(instance_id, 0)
    running = (view for view in snapshot.running if not view.has_ended)
    return frozenset(view.request_id for view in running if view.num_final_tokens > room)


def _loan_of(snapshot: Snapshot, num_tokens: int) -> int:
    """Return the tokens of a loan to ask for: outputs grow, so it is no small one."""
    return _whole_blocks(max(num_tokens, round(LOAN_SHARE * sum(snapshot.pools.values())), LEAST_LOAN))


def _whole_blocks(num_tokens: int) -> int:
    return blocks_of(num_tokens) * BLOCK_TOKENS


def _tokens_to_come(views: Sequence[RequestView]) -> int:
    """Return the tokens of KV that requests may need besides those that they have."""
    return sum(view.num_tokens_to_come for view in views)


def _fitting(snapshot: Snapshot) -> Sequence[RequestView]:
    """Return the live requests but for those that wait for a loan."""
    waiting_ids = {view.request_id for view in oversized(snapshot)}
    return [view for view in _live(snapshot) if view.request_id not in waiting_ids]


def _live(snapshot: Snapshot) -> Iterator[RequestView]:
    views = (*snapshot.waiting, *snapshot.running)
    return (view for view in views if not view.has_ended)
