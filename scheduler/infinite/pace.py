"""The pace of moves: the tokens that hide behind the steps of a debtor's lease (Infinite-LLM, figure 12)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from loong.core.plan import LeaseEnd
from loong.core.snapshot import RunningBatch, Snapshot
from loong.scheduler.infinite.lending import Loan, Loans
from loong.scheduler.tuning import MOVED_PER_STEP


def paced(loans: Loans, snapshot: Snapshot) -> tuple[Loans, Sequence[LeaseEnd]]:
    """Return the part of loans that the leases of their requests hide, and the ends of these leases.

    The remaining KV moves in later rounds, if it is still to move then.
    """
    moved, kept = Counter[int](), list[Loan]()
    for loan in loans:
        segment = loan.migration.segment
        batch_id = snapshot.request[segment.owner_id].batch_id
        assert batch_id is not None, "KV moves under a batch"
        num_left = MOVED_PER_STEP * _num_steps(snapshot.batch[batch_id]) - moved[batch_id]
        if positions := segment.positions[: max(0, num_left)]:
            moved[batch_id] += len(positions)
            migration = replace(loan.migration, segment=segment._replace(positions=positions))
            kept.append(replace(loan, migration=migration))
    ends = (_end(snapshot.batch[batch_id], num_tokens) for batch_id, num_tokens in moved.items())
    return kept, [end for end in ends if end is not None]


def _num_steps(batch: RunningBatch) -> int:
    """Return the steps under which KV moves: all but the present one and the last, and at least one."""
    return max(1, batch.last_step - batch.num_steps_taken - 2)


def _end(batch: RunningBatch, num_tokens: int) -> LeaseEnd | None:
    """Return the end of a lease after the steps that `num_tokens` take; None if it ends then in any case."""
    step = batch.num_steps_taken + 1 - (-num_tokens // MOVED_PER_STEP)
    return LeaseEnd(batch.batch_id, step) if step < batch.last_step else None
