"""A snapshot in parts: the views of sets of instances that share nothing."""

from collections import defaultdict
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


def hosts_of(snapshot: Snapshot) -> Parts:
    """Return the full instances of each host."""
    by_host: defaultdict[int, list[InstanceId]] = defaultdict(list)
    for instance_id in sorted(snapshot.pools):
        by_host[snapshot.instance[instance_id].host_id].append(instance_id)
    return tuple(map(tuple, by_host.values()))


def place_of(parts: Parts) -> dict[InstanceId, int]:
    """Return the index of each instance's part among `parts`."""
    return {instance_id: place for place, part in enumerate(parts) for instance_id in part}


def homes_of(snapshot: Snapshot, parts: Parts) -> dict[RequestId, int]:
    """Return the index of the part of each running request: where its KV begins, or else of its batch.

    Requests without either are left out.
    """
    place, homes = place_of(parts), dict[RequestId, int]()
    for view in snapshot.running:
        segments = view.placement.segments
        if segments and segments[0].instance_id in place:  # as of most requests
            homes[view.request_id] = place[segments[0].instance_id]
            continue
        holders = [segment.instance_id for segment in segments]
        if view.batch_id is not None:
            holders += snapshot.batch[view.batch_id].plan.group.instance_ids
        for instance_id in holders:
            if instance_id in place:
                homes[view.request_id] = place[instance_id]
                break
    return homes


def split(
    snapshot: Snapshot,
    parts: Parts,
    places: Mapping[RequestId, int],
) -> list[Snapshot]:
    """Return a snapshot of each part, in one pass over requests.

    A request belongs to the part with the index that `places` gives, or to none. A batch or a migration
    belongs to all parts that it touches.
    """
    place = place_of(parts)

    def by_part(items: Iterable[T], instance_ids_of: Callable[[T], Iterable[InstanceId]]) -> list[list[T]]:
        found: list[list[T]] = [[] for _ in parts]
        for item in items:
            for at in {place[i] for i in instance_ids_of(item) if i in place}:
                found[at].append(item)
        return found

    def by_place(views: Iterable[RequestView]) -> list[list[RequestView]]:
        found: list[list[RequestView]] = [[] for _ in parts]
        for view in views:
            if view.request_id in places:
                found[places[view.request_id]].append(view)
        return found

    waiting, running = by_place(snapshot.waiting), by_place(snapshot.running)
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
