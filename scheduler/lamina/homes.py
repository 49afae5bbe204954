"""The home of each request: the full instance that computes its tokens now.

KV on memory instances does not bind a request. What decodes add stays at their home until it is moved.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from loong.core.placement import InstanceId
from loong.core.request import RequestView
from loong.core.snapshot import RunningBatch, Snapshot
from loong.scheduler.common.leases import arrival_order


@dataclass(slots=True)
class Home:
    """A full instance and its requests, oldest first; `batch` is the one that it runs.

    `prompts` and `decodes` are at rest, `computing` are in flight. `num_free` are its free slots, and
    `num_joining_tokens` those that requests of this plan are to compute.
    """

    instance_id: InstanceId
    pool: int
    num_free: int
    batch: RunningBatch | None
    prompts: list[RequestView] = field(default_factory=list)
    decodes: list[RequestView] = field(default_factory=list)
    computing: list[RequestView] = field(default_factory=list)
    num_joining_tokens: int = 0

    @property
    def load(self) -> tuple[int, int, int]:
        """Return what a new request avoids: prompts to compute, other requests, and a high id."""
        num_others = len(self.decodes) + len(self.computing)
        return self.num_joining_tokens, num_others, self.instance_id

    def join(self, view: RequestView) -> None:
        """Add a request at rest."""
        (self.decodes if view.is_decoding else self.prompts).append(view)
        if not view.is_decoding:
            self.num_joining_tokens += view.num_uncomputed_tokens

    def num_held(self, view: RequestView) -> int:
        """Return the tokens of KV that a request has here."""
        return view.placement.tokens_by_instance().get(self.instance_id, 0)

    def has_own(self, view: RequestView) -> bool:
        """Return whether no other request reads the KV that a request has here."""
        return view.own_tokens_by_instance().get(self.instance_id, 0) == self.num_held(view)


def homes_of(snapshot: Snapshot) -> dict[InstanceId, Home]:
    """Return the homes of all running requests that have not ended, by instance.

    A request is at home where its batch runs, or where its newest KV on a full instance is; or else where
    least is to be done, first of all on an idle instance.
    """
    homes = {i: _home(snapshot, i) for i in sorted(snapshot.pools)}
    free_to_go = list[RequestView]()
    for view in sorted(_running(snapshot), key=arrival_order):
        home = homes.get(_bound_to(snapshot, view, homes))
        if home is None:
            free_to_go.append(view)
        elif view.is_plannable:
            home.join(view)
        else:
            home.computing.append(view)
    for view in free_to_go:
        if view.is_plannable and homes:
            min(homes.values(), key=lambda h: (h.batch is not None, *h.load)).join(view)
    return homes


def _home(snapshot: Snapshot, instance_id: InstanceId) -> Home:
    batch_id = snapshot.instance[instance_id].batch_id
    batch = None if batch_id is None else snapshot.batch[batch_id]
    return Home(instance_id, snapshot.pools[instance_id], snapshot.free[instance_id], batch)


def _running(snapshot: Snapshot) -> Iterator[RequestView]:
    return (view for view in snapshot.running if not view.has_ended)


def _bound_to(snapshot: Snapshot, view: RequestView, homes: Mapping[InstanceId, Home]) -> InstanceId:
    """Return the instance that a request is bound to, or one that is no home."""
    if view.batch_id is not None and view.batch_id in snapshot.batch:
        return snapshot.batch[view.batch_id].plan.blocks_of(view.request_id)[0].master_id
    own = [s for s in view.placement.segments if s.instance_id in homes]
    return max(own, key=lambda s: s.positions[-1]).instance_id if own else -1
