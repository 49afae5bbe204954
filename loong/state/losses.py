"""The loss of an instance with its KV, whose batches are void then."""

from collections.abc import Iterator

from loong.core.applied import Applied, CommittedBatch
from loong.core.errors import InvalidEventError
from loong.core.events import InstanceLost
from loong.core.instance import InstanceKind
from loong.core.instructions import Instruction, ReleaseKV
from loong.core.placement import InstanceId, KVSegment
from loong.core.positions import EMPTY, subtract
from loong.core.request import RequestId
from loong.core.void_batches import void_batches
from loong.state.accounting import Accounting
from loong.state.flights import Flights
from loong.state.in_flight_batch import InFlightBatch
from loong.state.live_request import LiveRequest


def lose_instance(accounting: Accounting, event: InstanceLost) -> Applied:
    """Remove an instance. Requests keep the KV that is elsewhere, and miss only what was lost.

    Migrations between other instances go on.
    """
    instance_id = event.instance_id
    if instance_id not in accounting.pools.instances:
        raise InvalidEventError(f"instance {instance_id} is lost, but was not there")
    if accounting.pools.instances[instance_id].kind is not InstanceKind.HOST:  # which is lost with another
        _suspect_requests(accounting, instance_id)
    requests, flights = accounting.requests, accounting.flights
    instructions, voided = list[Instruction](), list[CommittedBatch]()
    hit: dict[RequestId, LiveRequest] = {}
    in_flight = (*flights.ending.values(), *flights.batches.values())
    for batch_id in void_batches([b.parts for b in in_flight], {instance_id}, event.void_batch_ids):
        batch = flights.void_batch(batch_id)
        voided.append(batch.committed)
        accounting.counts.times.end(batch_id, event.time)
        hit.update((request_id, requests.by_id[request_id]) for request_id in batch.request_ids)
        instructions += _leave(accounting, batch, instance_id)
    hit.update((live.request.request_id, live) for live in _void_moves(accounting, instance_id))
    for request_id, live in requests.by_id.items():
        if request_id in hit or instance_id in live.placement.instance_ids:
            hit[request_id] = live
            requests.lose(live, instance_id)
    requests.owners.lose(instance_id)
    accounting.pools.lose(instance_id, returns=event.returns)
    accounting.counts.add(num_losses=1)
    return Applied((*instructions, *requests.settle(hit.values())), voided=tuple(voided))


def _suspect_requests(accounting: Accounting, instance_id: InstanceId) -> None:
    """Suspect the requests that the instance may have been computing, or serving, when it was lost.

    A batch behind one whose end is near may have begun, and the report of that is lost with the instance. No
    other batch that has not started had a part in the loss: its instance may have been lost before.
    """
    requests, flights = accounting.requests, accounting.flights
    suspected: dict[RequestId, range] = {}
    for batch in (*flights.ending.values(), *flights.batches.values()):
        may_have_begun = batch.running.has_started or flights.ending_on(batch.plan)
        if not may_have_begun or instance_id not in batch.running.participant_ids:
            continue
        for request_id in batch.plan.request_ids:
            positions = batch.unfinished_positions(requests.by_id[request_id])
            if before := suspected.get(request_id):
                positions = range(min(before.start, positions.start), max(before.stop, positions.stop))
            suspected[request_id] = positions
    for request_id in requests.by_id:
        live = requests.changing(request_id)
        if positions := suspected.get(request_id, EMPTY):
            live.losses.suspect(positions)
        else:
            live.losses.num_others += 1


def _leave(accounting: Accounting, batch: InFlightBatch, lost_id: InstanceId) -> Iterator[Instruction]:
    """Release what a void batch may have stored on the instances that are left.

    Siblings wait on for the end of their prompt, or begin without KV if they have a token already.
    """
    survivors = tuple(
        [i for i in batch.running.participant_ids if i != lost_id and i in accounting.pools.instances]
    )
    for request_id in batch.plan.request_ids:
        live = accounting.requests.by_id[request_id]
        if survivors:
            for segment in batch.unfinished(live):
                yield from _released(accounting.flights, segment, survivors)
            for sibling in live.siblings:
                yield ReleaseKV(sibling.request.request_id, survivors, is_void=True)
        if batch.num_tokens.get(request_id):
            accounting.requests.start_without_kv(live)


def _released(
    flights: Flights, segment: KVSegment, survivors: tuple[InstanceId, ...]
) -> Iterator[Instruction]:
    """Release what survivors may have of a segment, but not the slots of KV that is to arrive there.

    A migration's slots are released with it.
    """
    owner_id, positions = segment.owner_id, segment.positions
    arriving = [m.arriving for m in flights.migrations.values() if m.segment.owner_id == owner_id]
    receivers = {arrival.instance_id for arrival in arriving}
    if others := tuple(i for i in survivors if i not in receivers):
        yield ReleaseKV(owner_id, others, positions, is_void=True)
    for instance_id in receivers.intersection(survivors):
        rest: tuple[range, ...] = (positions,)
        for arrival in arriving:
            if arrival.instance_id == instance_id:
                rest = subtract(rest, arrival.positions)
        for piece in rest:
            yield ReleaseKV(owner_id, (instance_id,), piece, is_void=True)


def _void_moves(accounting: Accounting, lost_id: InstanceId) -> Iterator[LiveRequest]:
    """Remove the migrations and copies of a lost instance; yield their requests.

    A finished copy takes the place of a source that is lost.
    """
    requests, flights = accounting.requests, accounting.flights
    for migration_id, migration in tuple(flights.copies.items()):
        if lost_id in (migration.segment.instance_id, migration.destination_id):
            del flights.copies[migration_id]
            requests.copies.lose(migration_id, migration, lost_id)
    for migration_id, migration in tuple(flights.migrations.items()):
        if lost_id in (migration.segment.instance_id, migration.destination_id):
            _, live = flights.close_migration(migration_id)
            if migration.destination_id != lost_id:
                requests.release_arriving(live, migration)
            yield live
    for request_id, live in requests.by_id.items():
        for migration in [m for m in live.copied if lost_id in (m.segment.instance_id, m.destination_id)]:
            requests.changing(request_id).copied.remove(migration)
            if migration.destination_id != lost_id:
                live.placement = live.placement.moving(migration.segment, migration.destination_id)
            yield live
