"""The consequences of the end of a batch that no state has committed."""

from loong.core.applied import Applied, CommittedBatch
from loong.core.instructions import RunBatch
from loong.core.snapshot import RunningBatch


def ended(batch: RunBatch, started_at: float, num_reserved: int = 0) -> Applied:
    """Return what follows from the end of a batch, which had `num_reserved` tokens on each of its group."""
    kv_reserved = tuple((i, num_reserved) for i in batch.plan.group.instance_ids)
    num_steps, holder_ids = batch.plan.num_steps, batch.holder_ids
    running = RunningBatch(
        batch.batch_id, batch.plan, started_at, num_steps, num_steps, started_at, True, holder_ids
    )
    return Applied(ended=CommittedBatch(batch, running, kv_reserved))
