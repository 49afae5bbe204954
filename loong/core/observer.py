"""The protocol of observers of the loop from events to plans."""

from collections.abc import Sequence
from typing import Protocol

from loong.core.applied import Applied
from loong.core.events import Event
from loong.core.instructions import Instruction
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot


class Observer(Protocol):
    """Receives all events and plans of the loop, in order. It must not change them, and must not block.

    A subclass does nothing with those that it does not define.
    """

    def on_event(self, _event: Event, _applied: Applied, /) -> None:
        """Receive an event that the state has applied, and its consequences."""
        return

    def on_plan(
        self,
        _events: Sequence[Event],
        _snapshot: Snapshot,
        _plan: IterationPlan,
        _instructions: Sequence[Instruction],
        /,
    ) -> None:
        """Receive the plan for a snapshot, the events that it answers, and the instructions that follow from
        it.
        """
        return
