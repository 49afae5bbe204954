"""Variants of `esp` with one part replaced, to measure the value of that part."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan
from loong.core.request import RequestView
from loong.scheduler.esp.admission import Order, PrefillCandidate, by_arrival
from loong.scheduler.esp.allocation import Allocation
from loong.scheduler.esp.batching import BatchBuilder
from loong.scheduler.esp.chunk_size import ChunkSizer
from loong.scheduler.esp.group import Group
from loong.scheduler.esp.planner import ElasticPlanner
from loong.scheduler.esp.step_builder import StepBuilder

NO_LIMIT = 10**9  # seconds or tokens


class ByArrival(ElasticPlanner):
    """First come, first served instead of by deadline."""

    order: ClassVar[Order] = staticmethod(by_arrival)


class _Narrow(Allocation):
    grows: ClassVar[bool] = False


class NoScaleUp(ElasticPlanner):
    """A prompt keeps the DoP that it began with.

    Groups grow only where room lacks, or where otherwise nothing would end.
    """

    allocation: ClassVar[type[Allocation]] = _Narrow


class _InPlaceSizer(ChunkSizer):
    def keeper(self, view: RequestView) -> InstanceId | None:  # noqa: ARG002
        """Return None: KV stays where it is made, if there is room."""
        return None


class InPlaceStep(StepBuilder):
    """A step whose KV stays with the instances that compute it."""

    sizer: ClassVar[type[ChunkSizer]] = _InPlaceSizer


class _InPlace(BatchBuilder):
    step: ClassVar[type[StepBuilder]] = InPlaceStep


class NoRetention(ElasticPlanner):
    """KV stays where it is made, so groups do not shrink after a prefill."""

    batch_builder: ClassVar[type[BatchBuilder]] = _InPlace


class _Whole(BatchBuilder):
    def budget(self, decodes: Iterable[RequestView]) -> float:  # noqa: ARG002 - they wait
        """Return more seconds than any prompt takes."""
        return NO_LIMIT


class NoChunks(ElasticPlanner):
    """Whole prompts in one step; decodes of the group wait with them."""

    batch_builder: ClassVar[type[BatchBuilder]] = _Whole

    def plan(self) -> IterationPlan:
        """Return the whole plan, without a limit of tokens."""
        self.config = replace(self.config, max_num_batched_tokens=NO_LIMIT)
        return ElasticPlanner.plan(self)


class _AllTogether(Allocation):
    def allocate(self, order: Sequence[PrefillCandidate]) -> list[Group]:
        """Return all groups that only decode as one."""
        groups = Allocation.allocate(self, order)
        decoding = [g for g in groups if g.is_ready and not g.prefills]
        if len(decoding) < 2:
            return groups
        instance_sets = [instance_set for group in decoding for instance_set in group.instance_sets]
        merged = Group(instance_sets, spare=sum(group.spare for group in decoding))
        return [*(g for g in groups if all(g is not d for d in decoding)), merged]


class NoSplit(ElasticPlanner):
    """Decode batches merge and never split."""

    allocation: ClassVar[type[Allocation]] = _AllTogether


ABLATIONS: dict[str, type[ElasticPlanner]] = {
    "esp-fcfs": ByArrival,
    "esp-no-scale-up": NoScaleUp,
    "esp-no-retention": NoRetention,
    "esp-no-chunks": NoChunks,
    "esp-no-split": NoSplit,
}
