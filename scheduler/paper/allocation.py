"""Allocation as published: the instances E_p that compute the prompts, and the KV that leaves them."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

from loong.core.placement import InstanceId
from loong.core.plan import KVMigration
from loong.core.request import RequestView
from loong.scheduler.common.future_kv import allocation_cost, allocation_gain
from loong.scheduler.paper.cluster import DecodeBatch, PaperCluster

Moves: TypeAlias = tuple[KVMigration, ...]


@dataclass(slots=True)
class PaperAllocation:
    """Builds E_p: `free` is the slots that each of its instances will have.

    It begins with idle instances and the groups of `stopped` batches. `moves` are, for each instance to be
    emptied, the destinations of its KV, and `arriving` their amounts. `room` is the slots that each instance
    that goes on decoding can spare.
    """

    cluster: PaperCluster
    prompts: list[RequestView]
    stopped: list[DecodeBatch]
    free: dict[InstanceId, int] = field(default_factory=dict)
    moves: dict[InstanceId, Moves] = field(default_factory=dict)
    room: dict[InstanceId, int] = field(default_factory=dict)
    arriving: Counter[InstanceId] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        cluster = self.cluster
        self.free.update((i, cluster.free[i]) for i in cluster.idle)
        for batch in cluster.decoding:
            if batch in self.stopped:
                self.free.update((i, cluster.free[i]) for i in batch.instance_ids)
            else:
                num_kept = -(-cluster.num_demanded(batch) // len(batch.instance_ids))
                for i in batch.instance_ids:
                    self.room[i] = cluster.planning_view.snapshot.instance[i].kv_free - num_kept

    def allocate(self) -> None:
        """Empty instances while slots lack or (3) and (4) show a gain.

        Without enough slots, no prompt begins.
        """
        while self.prompts and (e_min := self._least_used) is not None:
            moves = self._moves_off(e_min)
            if moves is None or (self._num_missing <= 0 and not self._gains(moves)):
                break
            self._empty(e_min, moves)
        if self._num_missing > 0:
            self.prompts.clear()

    @property
    def _num_missing(self) -> int:
        return sum(view.num_uncomputed_tokens for view in self.prompts) - sum(self.free.values())

    @property
    def _least_used(self) -> InstanceId | None:
        """Return e_min, the decode instance with least KV, of those with some and without arriving KV.

        An instance without KV is there for slots that its batch lacked.
        """
        num_used = {i: self._capacity(i) - self.cluster.free[i] for i in self.room}
        candidates = [i for i in self.room if i not in self.cluster.receiving and not self.arriving[i]]
        return min((i for i in candidates if num_used[i]), key=lambda i: (num_used[i], i), default=None)

    def _gains(self, moves: Moves) -> bool:
        """Return whether (3) is not below (4) for e_min, from which all KV moves."""
        now, wider = (self.cluster.prefill_time(self.prompts, len(self.free) + more) for more in (0, 1))
        seconds = 0.0
        if moves:
            source_id, destination_id = moves[0].segment.instance_id, moves[0].destination_id
            num_tokens = sum(len(move.segment.positions) for move in moves)
            seconds = self.cluster.cost_model.migration_time(num_tokens, source_id, destination_id)
        lengths = [view.num_prompt_tokens for view in self.prompts]
        return allocation_gain(now, wider, lengths) >= allocation_cost(seconds, lengths)

    def _moves_off(self, instance_id: InstanceId) -> Moves | None:
        """Return the moves of an instance's KV, and so of its requests' next leases; None if room lacks.

        A request's KV goes where more of it is, or else where most room is.
        """
        room = {i: num_free for i, num_free in self.room.items() if i != instance_id}
        moves = []
        for view in self.cluster.batch_on(instance_id).views:
            held = view.placement.tokens_by_instance()
            for segment in view.placement.segments:
                if segment.instance_id == instance_id:
                    num_tokens = len(segment.positions) + self.cluster.config.lease_steps
                    roomy = [i for i in room if room[i] >= num_tokens]
                    if not roomy:
                        return None
                    destination_id = max(roomy, key=lambda i: (held.get(i, 0) > 0, room[i], -i))
                    room[destination_id] -= num_tokens
                    moves.append(KVMigration(segment, destination_id))
        return tuple(moves)

    def _empty(self, instance_id: InstanceId, moves: Moves) -> None:
        for move in moves:
            num_tokens = len(move.segment.positions)
            self.room[move.destination_id] -= num_tokens + self.cluster.config.lease_steps
            self.arriving[move.destination_id] += num_tokens
        del self.room[instance_id]
        self.free[instance_id] = self._capacity(instance_id)
        self.moves[instance_id] = moves

    def _capacity(self, instance_id: InstanceId) -> int:
        return self.cluster.planning_view.snapshot.instance[instance_id].kv_capacity
