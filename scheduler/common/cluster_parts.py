"""A snapshot in parts: the views of sets of instances that share nothing."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import TypeAlias, TypeVar

from loong.core.placement import InstanceId
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import Snapshot

T = TypeVar("T")
Parts: TypeAlias = tuple[tuple[InstanceId, ...], ...]
"""Instances, each in one part."""


@cache
def groups_of(instance_ids: tuple[InstanceId, ...], size: int) -> Parts:
    """Return groups of `size` consecutive ids, counted from 0, without the instances that are lost.

    `instance_ids` are ascending. A loss leaves the other groups as they are.
    """
    return tuple(tuple(group) for _, group in groupby(instance_ids, lambda instance_id: instance_id // size))


@cache
def place_of(parts: Parts) -> Mapping[InstanceId, int]:
    """Return the index of each instance's part among `parts`."""
    return {instance_id: place for place, part in enumerate(parts) for instance_id in part}


def home_of(view: RequestView, snapshot: Snapshot, parts: Parts) -> int | None:
    """Return the index of the part with the oldest KV of a request, or else of its batch.

    None for a request without either.
    """
    place = place_of(parts)
    for segment in view.placement.segments:
        if segment.instance_id in place:
            return place[segment.instance_id]
    if view.batch_id is None:
        return None
    group = snapshot.batch[view.batch_id].plan.group
    return next((place[i] for i in group.instance_ids if i in place), None)


def split(snapshot: Snapshot, parts: Parts, assigned: Mapping[RequestId, int]) -> list[Snapshot]:
    """Return a snapshot of each part, in one pass over requests.

    A running request belongs to the part where its KV begins, if that is in any part. A request without such
    KV belongs to the part that it is `assigned`, or to none. A batch or a migration belongs to all parts that
    it touches.
    """
    place = place_of(parts)

    def by_part(items: Iterable[T], instance_ids_of: Callable[[T], Iterable[InstanceId]]) -> list[list[T]]:
        found: list[list[T]] = [[] for _ in parts]
        for item in items:
            for at in {place[i] for i in instance_ids_of(item) if i in place}:
                found[at].append(item)
        return found

    waiting: list[list[RequestView]] = [[] for _ in parts]
    for view in snapshot.waiting:
        if view.request_id in assigned:
            waiting[assigned[view.request_id]].append(view)
    running: list[list[RequestView]] = [[] for _ in parts]
    for view in snapshot.running:
        at = home_of(view, snapshot, parts)
        if at is None:
            at = assigned.get(view.request_id)
        if at is not None:
            running[at].append(view)
    batches, ending = (
        by_part(some, lambda batch: batch.plan.group.instance_ids)
        for some in (snapshot.batches, snapshot.ending)
    )
    migrations = by_part(snapshot.migrations, lambda m: (m.segment.instance_id, m.destination_id))
    return [
        replace(
            snapshot,
            instances=tuple(snapshot.instance[i] for i in part),
            waiting=tuple(waiting[number]),
            running=tuple(running[number]),
            batches=tuple(batches[number]),
            migrations=tuple(migrations[number]),
            ending=tuple(ending[number]),
            leaving={i: num_tokens for i, num_tokens in snapshot.leaving.items() if i in part},
        )
        for number, part in enumerate(parts)
    ]
