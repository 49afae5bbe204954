"""The scale-ups and scale-downs of groups in a run, as the server counts them."""

from collections.abc import Iterator
from dataclasses import dataclass

from loong.core.cluster_history import BatchSlice, ClusterHistory
from loong.core.request import RequestId


@dataclass(frozen=True, slots=True)
class Scaling:
    """A batch on more instances than any of its requests had before, or on fewer than one of them had."""

    batch: BatchSlice
    is_up: bool


def scalings_of(history: ClusterHistory) -> Iterator[Scaling]:
    """Yield the scale-ups and scale-downs of a run, in the order in which they were planned."""
    last_dops: dict[RequestId, int] = {}
    for batch in sorted(history.batches, key=lambda batch: batch.batch_id):
        dop = batch.group.dop
        before = max((last_dops[i] for i in batch.request_ids if i in last_dops), default=dop)
        if dop != before:
            yield Scaling(batch, dop > before)
        last_dops.update(dict.fromkeys(batch.request_ids, dop))
