"""The prompts of some instances, and what their order and their admission depend on."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loong.core.request import RequestId, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.cluster_parts import Parts


@dataclass(frozen=True, slots=True)
class PromptQueue:
    """The prompts of `num_instances` instances with `capacity` slots in all.

    Those that are `waiting` have no KV, and are in order of arrival. Some KV of those that have `begun`
    exists. `running` are all requests with KV there or in a batch.
    """

    now: float
    num_instances: int
    capacity: int
    waiting: Sequence[RequestView]
    begun: Sequence[RequestView]
    running: Sequence[RequestView]

    @property
    def requests(self) -> tuple[RequestView, ...]:
        """Return all its requests."""
        return (*self.waiting, *self.running)

    @property
    def is_any_plannable(self) -> bool:
        """Return whether a request with KV there is not in flight."""
        return any(view.batch_id is None and view.is_plannable for view in self.running)


def queues_of(snapshot: Snapshot, parts: Parts, places: Mapping[RequestId, int]) -> dict[int, PromptQueue]:
    """Return the queue of each part with a request, by the index that `places` gives for the request.

    They come in the order of their first waiting prompts, those without one last.
    """
    waiting, begun, running = (defaultdict[int, list[RequestView]](list) for _ in range(3))
    for view in snapshot.waiting:
        if view.request_id in places:
            waiting[places[view.request_id]].append(view)
    for view in snapshot.running:
        if view.request_id in places:
            place = places[view.request_id]
            running[place].append(view)
            if view.batch_id is None and view.is_plannable and not view.is_decoding:
                begun[place].append(view)
    capacity = {place: sum([snapshot.pools[i] for i in parts[place]]) for place in (*waiting, *running)}
    return {
        place: PromptQueue(
            snapshot.now, len(parts[place]), num_slots, waiting[place], begun[place], running[place]
        )
        for place, num_slots in capacity.items()
    }
