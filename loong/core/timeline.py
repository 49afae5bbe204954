"""What ran when: one slice a batch, for people to look at."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from loong.core.events import BatchFinished, Event, InstanceLost
from loong.core.instance import ESPGroup
from loong.core.instructions import Instruction, RunBatch
from loong.core.placement import InstanceId
from loong.core.request import RequestId
from loong.core.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """A batch that ran. Times are the executor's; `kv_used` is (instance, tokens) of all at its end."""

    batch_id: int
    group: ESPGroup
    phase: str  # prefill, decode or mixed
    started_at: float
    ended_at: float
    request_ids: tuple[RequestId, ...]
    kv_used: tuple[tuple[InstanceId, int], ...]


class Timeline:
    """The last batches, oldest first."""

    def __init__(self, max_slices: int) -> None:
        self.slices: deque[BatchSlice] = deque(maxlen=max_slices)
        self._running: dict[int, tuple[RunBatch, float]] = {}

    def record(self, event: Event, snapshot: Snapshot, instructions: Iterable[Instruction]) -> None:
        """Take in an event, the cluster after it, and what was then told to run."""
        if isinstance(event, BatchFinished) and event.batch_id in self._running:
            batch, started_at = self._running.pop(event.batch_id)
            kv_used = tuple((i.instance_id, i.kv_used) for i in snapshot.instances)
            plan = batch.plan
            self.slices.append(
                BatchSlice(
                    event.batch_id,
                    plan.group,
                    _phase(batch),
                    started_at,
                    event.time,
                    plan.request_ids,
                    kv_used,
                )
            )
        if isinstance(event, InstanceLost):
            self._drop_batches_of(event.instance_id)
        for instruction in instructions:
            if isinstance(instruction, RunBatch):
                self._running[instruction.batch_id] = (instruction, event.time)

    def _drop_batches_of(self, instance_id: InstanceId) -> None:
        """A batch that lost an instance never finishes."""
        self._running = {
            batch_id: (batch, started_at)
            for batch_id, (batch, started_at) in self._running.items()
            if instance_id not in batch.plan.group.instance_ids
        }


def _phase(batch: RunBatch) -> str:
    decodes = {given.num_output_tokens > 0 and len(given.token_ids) == 1 for given in batch.inputs}
    return "mixed" if len(decodes) > 1 else "decode" if True in decodes else "prefill"
