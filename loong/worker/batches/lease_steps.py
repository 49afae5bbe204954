"""The course of a lease, which all instances that take part follow alike: members and holders."""

from collections import Counter
from dataclasses import dataclass

from loong.core.instructions import RunBatch
from loong.core.placement import InstanceId
from loong.core.shared_kv import num_saved_keys, on


@dataclass(slots=True)
class LeaseSteps:
    """Step `step` is on the device, and the next one is launched before the host knows its tokens.

    `end` is the step before which the lease ends, as far as that is known. The first `num_steps` steps have
    slots, and no list of slots has room for more than `most_steps`.
    """

    end: int
    num_steps: int
    most_steps: int
    step: int = 0
    _lengthened_at: int = -1

    @classmethod
    def of(cls, command: RunBatch, max_num_slots: int, least_saved: int | None) -> "LeaseSteps":
        """Return the course of a lease whose lists of slots have room for `max_num_slots`."""
        num_steps = command.plan.num_steps
        num_held = sum(given.placement.num_tokens for given in command.inputs)
        if num_held + num_steps * len(command.inputs) > max_num_slots:
            num_held = sum(_num_listed(command, least_saved).values())
        return cls(num_steps, num_steps, max(num_steps, (max_num_slots - num_held) // len(command.inputs)))

    @property
    def is_last(self) -> bool:
        """Return whether no step follows `step`."""
        return self.step + 1 >= min(self.end, self.num_steps)

    def lengthen(self) -> bool:
        """Let all steps before `end` have slots once the last lists have arrived. Return whether more do."""
        self.end = min(self.end, self.most_steps)
        if self.end <= self.num_steps or self.step < self._lengthened_at + 2:
            return False
        self.num_steps, self._lengthened_at = self.end, self.step
        return True

    def end_before(self, step: int) -> None:
        """End the lease before `step`, as its leader says while the step after `self.step` is under way."""
        self.end = max(step, self.step + 2)


def has_room(command: RunBatch, max_num_slots: int, least_saved: int | None) -> bool:
    """Return whether the lists of a lease's slots have room on all instances.

    Slots that requests share are in one list if that saves `least_saved`. All compute the same answer.
    """
    writes = command.plan.writes
    num_slots = sum(len(segment.positions) for segment in writes)
    num_slots += sum(given.placement.num_tokens for given in command.inputs)
    if num_slots <= max_num_slots:
        return True
    by_instance = _num_listed(command, least_saved)
    for segment in writes:
        by_instance[segment.instance_id] += len(segment.positions)
    return max(by_instance.values()) <= max_num_slots


def _num_listed(command: RunBatch, least_saved: int | None) -> Counter[InstanceId]:
    """Return the slots with KV from before the lease that each instance lists."""
    by_instance: Counter[InstanceId] = Counter()
    for given in command.inputs:
        by_instance.update(given.placement.tokens_by_instance())
    for instance_id in by_instance:
        shared = [on(given.placement.shared, instance_id) for given in command.inputs]
        by_instance[instance_id] -= num_saved_keys(shared, least_saved)
    return by_instance
