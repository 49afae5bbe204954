"""A timeline of batches as a Chrome trace, which Perfetto and chrome://tracing open."""

from collections.abc import Iterable, Sequence

from loong.core.timeline import BatchSlice

_PROCESS_ID = 1
_US = 1e6  # the format counts microseconds


def chrome_trace(slices: Sequence[BatchSlice]) -> dict[str, object]:
    """One track an instance, a slice for each batch it took part in, and counters of the KV in the pools."""
    instance_ids = {instance_id for batch in slices for instance_id in batch.group.instance_ids}
    events = [_track(instance_id) for instance_id in sorted(instance_ids)]
    for batch in slices:
        events.extend(_batch_events(batch))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _track(instance_id: int) -> dict[str, object]:
    name = {"name": f"instance {instance_id}"}
    return {"ph": "M", "name": "thread_name", "pid": _PROCESS_ID, "tid": instance_id, "args": name}


def _batch_events(batch: BatchSlice) -> Iterable[dict[str, object]]:
    what = {
        "batch_id": batch.batch_id,
        "group": list(batch.group.instance_ids),
        "dop": batch.group.dop,
        "phase": batch.phase,
        "request_ids": list(batch.request_ids),
    }
    for instance_id in batch.group.instance_ids:
        yield {
            "ph": "X",
            "name": batch.phase,
            "ts": batch.started_at * _US,
            "dur": (batch.ended_at - batch.started_at) * _US,
            "pid": _PROCESS_ID,
            "tid": instance_id,
            "args": what,
        }
    tokens = {f"instance {instance_id}": num_tokens for instance_id, num_tokens in batch.kv_used}
    yield {"ph": "C", "name": "KV tokens", "ts": batch.ended_at * _US, "pid": _PROCESS_ID, "args": tokens}
