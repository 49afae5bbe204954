"""What ran when: one slice a batch, for people to look at."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from loong.core.events import BatchFinished, Event, InstanceLost
from loong.core.instance import ESPGroup
from loong.core.instructions import Instruction, RunBatch
from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan
from loong.core.request import RequestId
from loong.core.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """A batch that ran. Times are the executor's; `kv_used` is (instance, tokens) of its group at
    its end."""

    batch_id: int
    group: ESPGroup
    phase: str  # prefill, decode or mixed
    started_at: float
    ended_at: float
    request_ids: tuple[RequestId, ...]
    kv_used: tuple[tuple[InstanceId, int], ...]


class Timeline:
    """An observer of the loop that keeps the last batches, oldest first."""

    def __init__(self, max_slices: int = 50_000) -> None:
        self.slices: deque[BatchSlice] = deque(maxlen=max_slices)
        self._running: dict[int, tuple[RunBatch, float]] = {}

    def took_in(self, event: Event, /) -> None:
        """Forget the batches of a lost instance: they never finish."""
        if isinstance(event, InstanceLost):
            self._running = {
                batch_id: (batch, started_at)
                for batch_id, (batch, started_at) in self._running.items()
                if event.instance_id not in batch.plan.group.instance_ids
            }

    def planned(
        self, event: Event, snapshot: Snapshot, _plan: IterationPlan, instructions: Sequence[Instruction], /
    ) -> None:
        """Keep what ended with `event`, and what was then told to run."""
        if isinstance(event, BatchFinished) and event.batch_id in self._running:
            batch, started_at = self._running.pop(event.batch_id)
            plan = batch.plan
            kv_used = tuple((i, snapshot.instance[i].kv_used) for i in plan.group.instance_ids)
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
        for instruction in instructions:
            if isinstance(instruction, RunBatch):
                self._running[instruction.batch_id] = (instruction, event.time)


def _phase(batch: RunBatch) -> str:
    decodes = {given.is_decoding for given in batch.inputs}
    return "mixed" if len(decodes) > 1 else "decode" if True in decodes else "prefill"
