"""Moves of KV that leases read meanwhile, so that no request waits for them, and the pace of others."""

from collections.abc import Iterator, Sequence, Set
from operator import attrgetter

from loong.core.cost.cost_model import CostModel
from loong.core.instance import MAX_MOVING_TOKENS
from loong.core.placement import InstanceId, KVSegment
from loong.core.plan import KVMigration, LeaseEnd
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.leases import lease_ends
from loong.scheduler.common.shares import Share, dealt_out
from loong.scheduler.tuning import LEAST_PIECE, PIECE_SECONDS


def is_movable(view: RequestView, ending_ids: Set[RequestId]) -> bool:
    """Return whether KV of a request in a lease can be copied while that runs; `ending_ids` end now."""
    if view.batch_id is None or view.request_id in ending_ids:
        return False
    return view.is_copyable and not view.num_siblings


def moved(view: RequestView, source_id: InstanceId, shares: Sequence[Share]) -> Iterator[KVMigration]:
    """Yield the moves of a request's oldest KV on an instance, one share after the other."""
    ranges = sorted(view.placement.on(source_id), key=attrgetter("start"))
    for segment in dealt_out(view.request_id, ranges, shares):
        yield KVMigration(KVSegment(view.request_id, segment.positions, source_id), segment.instance_id)


def piece_of_link(cost_model: CostModel, source_id: InstanceId, destination_id: InstanceId) -> int:
    """Return the most tokens of a request that move at a time, so that one that waits for it soon goes on."""

    def seconds(num_tokens: int) -> float:
        return cost_model.migration_time(num_tokens, source_id, destination_id)

    number = LEAST_PIECE
    while number < MAX_MOVING_TOKENS and seconds(2 * number) <= PIECE_SECONDS:
        number *= 2
    return number


def arrived_ends(snapshot: Snapshot) -> Iterator[LeaseEnd]:
    """Yield ends of leases that hold slots of KV that has arrived elsewhere."""
    moving_ids = {migration.segment.owner_id for migration in snapshot.migrations}
    arrived = {v.batch_id for v in snapshot.running if v.is_migrating and v.request_id not in moving_ids}
    yield from lease_ends(batch for batch in snapshot.batches if batch.batch_id in arrived)
