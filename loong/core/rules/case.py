"""A plan with the snapshot that it is for, as rules see it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from loong.core.errors import InvalidPlanError
from loong.core.placement import InstanceId, KVSegment
from loong.core.plan import BatchPlan, IterationPlan, QueryBlock
from loong.core.positions import first_of
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import Snapshot
from loong.core.value import value


@value
class Part:
    """A batch's part for one request: the first of its missing positions, in these blocks."""

    view: RequestView
    blocks: tuple[QueryBlock, ...]
    writes: tuple[KVSegment, ...]
    positions: tuple[range, ...]
    num_tokens: int


@dataclass(frozen=True)
class Case:
    """A plan, and the snapshot that it is for, after requests have borrowed (see `Snapshot.after`)."""

    snapshot: Snapshot
    plan: IterationPlan
    read_tokens_to_borrow: Mapping[InstanceId, int] = field(default_factory=dict)

    def view(self, request_id: RequestId) -> RequestView:
        """Return a request that the plan names. Raises `InvalidPlanError` unless it is live."""
        view = self.snapshot.request.get(request_id)
        if view is None:
            raise InvalidPlanError(f"the plan names request {request_id}, which is not live")
        return view

    @cached_property
    def parts(self) -> tuple[tuple[BatchPlan, tuple[Part, ...]], ...]:
        """Return every batch, with its part for each of its requests."""
        return tuple((batch, tuple(self._parts_of(batch))) for batch in self.plan.batches)

    def _parts_of(self, batch: BatchPlan) -> Iterator[Part]:
        for request_id in batch.request_ids:
            view, blocks = self.view(request_id), batch.blocks_of(request_id)
            num_tokens = len(blocks[0].positions)
            if len(blocks) > 1:
                num_tokens = sum([len(block.positions) for block in blocks])
            positions = first_of(view.missing, num_tokens)
            yield Part(view, blocks, batch.writes_of(request_id), positions, num_tokens)
