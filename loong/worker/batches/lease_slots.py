"""The slots of a lease on one instance: those of its requests' KV, and room for its steps."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from loong.attention.shared import SharedReaders
from loong.core.instructions import RequestInput, RunBatch
from loong.core.kv_layout import KVLayout
from loong.core.placement import InstanceId
from loong.core.request import RequestId
from loong.worker.kv.pool import KVPool
from loong.worker.steps.decode_state import DecodeRow, Held, LeaseBatch, Whole


class LeaseSlots:
    """Has slots for the first `num_steps` steps of the requests whose master the instance is.

    `batch` has all KV that the lease attends here.
    """

    def __init__(
        self, instance_id: InstanceId, pool: KVPool, command: RunBatch, least_saved: int | None
    ) -> None:
        self._instance_id, self._pool = instance_id, pool
        self._own = masters_inputs(command, instance_id)
        self.num_steps = command.plan.num_steps
        pool.allocate_few_each(
            [(given.request_id, _positions(given, 0, self.num_steps)) for given in self._own]
        )
        shared = shared_readers(command, instance_id, least_saved)
        self._rows = [self._row(given, shared) for given in self._own]
        peers = (i for i in command.plan.group.instance_ids if i != instance_id)
        self.batch = LeaseBatch(
            instance_id,
            self._rows,
            {i: held_for(command, i, instance_id, shared) for i in peers},
            command.holder_ids,
            shared,
            whole_kv(command, instance_id, pool.layout),
        )

    def lengthen(self, num_steps: int, rows: Iterable[int]) -> None:
        """Take slots for `num_steps` steps in total for the requests in these rows."""
        taken = []
        for row in rows:
            given = self._own[row]
            taken.append((given.request_id, _positions(given, self.num_steps, num_steps)))
            self._rows[row] = replace(self._rows[row], free=_positions(given, 0, num_steps))
        self._pool.allocate_few_each(taken)
        self.num_steps = num_steps

    def keep(self, num_steps: int) -> None:
        """Release the slots of all steps but the first `num_steps`."""
        self._pool.release_positions(
            [(given.request_id, _positions(given, num_steps, self.num_steps)) for given in self._own]
        )

    def _row(self, given: RequestInput, shared: SharedReaders) -> DecodeRow:
        assert given.sampling_params is not None, "it is sampled"
        first, free = given.placement.num_tokens, _positions(given, 0, self.num_steps)
        held = _held(given, self._instance_id, shared)
        return DecodeRow(given.token_ids[0], first, held, free, given.sampling_params)


def masters_inputs(command: RunBatch, instance_id: InstanceId) -> list[RequestInput]:
    """Return the requests whose master an instance is, in the order of the plan's blocks."""
    inputs = {given.request_id: given for given in command.inputs}
    return [inputs[b.request_id] for b in command.plan.queries if b.master_id == instance_id]


def shared_readers(command: RunBatch, instance_id: InstanceId, least_saved: int | None) -> SharedReaders:
    """Return what the requests of a lease read together on an instance."""
    placements = {given.request_id: given.placement for given in command.inputs}
    firsts = {request_id: placement.num_tokens for request_id, placement in placements.items()}
    return SharedReaders.of((instance_id,), placements, firsts, least_saved)


def whole_kv(command: RunBatch, instance_id: InstanceId, layout: KVLayout) -> Mapping[RequestId, Whole]:
    """Return all KV of a lease's requests on an instance, if there are layers with a window."""
    if layout.windows == (None,):
        return {}
    return {
        given.request_id: Whole(given.placement.num_tokens, given.placement.on(instance_id))
        for given in command.inputs
    }


def served_batch(
    command: RunBatch, instance_id: InstanceId, layout: KVLayout, least_saved: int | None
) -> LeaseBatch:
    """Return a lease that an instance serves, as it begins there."""
    shared = shared_readers(command, instance_id, least_saved)
    held = {i: held_for(command, i, instance_id, shared) for i in command.plan.group.instance_ids}
    whole = whole_kv(command, instance_id, layout)
    return LeaseBatch(instance_id, (), held, command.holder_ids, shared, whole)


def held_for(
    command: RunBatch, master_id: InstanceId, instance_id: InstanceId, shared: SharedReaders
) -> list[Held]:
    """Return the KV that an instance holds of each request of a master, in the order of the plan's blocks.

    What a request reads with others is left out.
    """
    return [_held(given, instance_id, shared) for given in masters_inputs(command, master_id)]


def _held(given: RequestInput, instance_id: InstanceId, shared: SharedReaders) -> Held:
    return given.request_id, shared.alone(given.request_id, given.placement.on(instance_id))


def _positions(given: RequestInput, first_step: int, stop_step: int) -> range:
    """Return the positions whose KV a request makes in some steps, unless a token ends it before."""
    first = given.placement.num_tokens
    return range(first + first_step, min(first + stop_step, given.last_stop))
