"""The captured steps by which an instance, with weights or not, attends for decode leases of others."""

from collections import Counter
from dataclasses import dataclass
from itertools import islice

from loong.core.instance import Service
from loong.core.instructions import RunBatch
from loong.core.placement import InstanceId
from loong.core.plan import Transfer
from loong.fabric.world import World
from loong.model.tensor_parallel import Shard
from loong.worker.backend import Backend
from loong.worker.batches.lease_steps import has_room
from loong.worker.kv.pool import KVPool
from loong.worker.steps.decode_state import BATCH_SIZES, GROUP_SIZES
from loong.worker.steps.group_exchange import KVExchange
from loong.worker.steps.serve_graph import ServeGraph


@dataclass(frozen=True, slots=True)
class ServedLeases:
    """Steps for as many leases at a time as there are `services`, and the leases that can be captured.

    Members and holders of a lease come to the same answer: `max_num_slots`, the slots that it can list on an
    instance, is the same on all.
    """

    world: World
    services: tuple[ServeGraph, ...]
    max_num_slots: int
    least_saved: int | None
    has_groups: bool

    @classmethod
    def of(
        cls,
        instance_id: InstanceId,
        shard: Shard,
        pool: KVPool,
        backend: Backend,
        world: World,
        exchange: KVExchange | None,
        max_num_slots: int,
    ) -> "ServedLeases":
        """Return the steps of an instance, which `capture` prepares; none without an exchange."""
        lanes = {} if exchange is None or backend.serves is Service.NONE else exchange.services()
        services = tuple(
            ServeGraph(instance_id, shard, pool, backend.service(), lane, service, max_num_slots)
            for lane, service in islice(lanes.items(), backend.max_served_leases)
        )
        return cls(world, services, max_num_slots, backend.least_saved, exchange is not None)

    def capture(self) -> None:
        """Prepare the steps."""
        for service in self.services:
            service.capture()

    def max_size(self, num_instances: int) -> int:
        """Return the most tokens that a master can have where this number of instances take part."""
        if num_instances == 1:
            return BATCH_SIZES[-1]
        return GROUP_SIZES[-1] if self.has_groups else 0

    def can_run(self, command: RunBatch) -> bool:
        """Return whether a batch is decode, on a group for which steps are captured.

        Instances serve few captured leases at a time, so only longer ones than a step are.
        """
        blocks = command.plan.queries
        num_tokens = Counter(block.master_id for block in blocks)
        return (
            (not command.holder_ids or (bool(self.services) and command.plan.num_steps > 1))
            and self.world.is_one_host(command.participant_ids)
            and max(num_tokens.values()) <= self.max_size(len(command.participant_ids))
            and all(len(b.positions) == 1 and b.transfer is Transfer.QUERY for b in blocks)
            and all(given.num_output_tokens > 0 and not given.placement.has_holes for given in command.inputs)
            and has_room(command, self.max_num_slots, self.least_saved)
        )
