"""The hosts of a cluster, together where a request needs several of them."""

from collections.abc import Iterable

from loong.core.placement import InstanceId
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.cluster_parts import Parts, hosts_of, place_of


def joined_hosts(snapshot: Snapshot) -> Parts:
    """Return the full instances of each host, or of several that share a request or a batch.

    Hosts share a request whose KV is on all of them, or that fits into no fewer. A request without KV that
    fits into no part extends the largest one.
    """
    joining = _Joining(hosts_of(snapshot), snapshot)
    for batch in snapshot.ending:
        joining.join(batch.plan.group.instance_ids)
    homeless = [view for view in snapshot.waiting if not view.has_ended]
    homes = list[tuple[RequestView, int]]()
    for view in snapshot.running:
        group = () if view.batch_id is None else snapshot.batch[view.batch_id].plan.group.instance_ids
        home = joining.join((*view.placement.instance_ids, *group))
        if home is not None and not view.has_ended:
            homes.append((view, home))
        elif not view.has_ended:
            homeless.append(view)
    for view, home in homes:
        joining.extend(home, view.num_final_tokens)
    joining.extend(joining.largest, max((view.num_final_tokens for view in homeless), default=0))
    return joining.parts


class _Joining:
    """Hosts that become parts. A part has the number of its first host."""

    def __init__(self, hosts: Parts, snapshot: Snapshot) -> None:
        self._host_of = place_of(hosts)
        self._part_of = list(range(len(hosts)))
        self._capacity = {
            number: sum(snapshot.pools[i] for i in host) for number, host in enumerate(hosts)
        }  # by part

    @property
    def parts(self) -> Parts:
        """The instances of each part, ascending."""
        return tuple(
            tuple(sorted(i for i, host in self._host_of.items() if self._part_of[host] == part))
            for part in sorted(self._capacity)
        )

    @property
    def largest(self) -> int:
        """The part with most KV; of equal ones the first."""
        return min(self._capacity, key=lambda part: (-self._capacity[part], part))

    def join(self, instance_ids: Iterable[InstanceId]) -> int | None:
        """Make one part of the hosts of these instances, and return a host of it; None if none is full."""
        found = list(dict.fromkeys(self._host_of[i] for i in instance_ids if i in self._host_of))
        for host in found[1:]:
            self._merge(self._part_of[found[0]], self._part_of[host])
        return found[0] if found else None

    def extend(self, host: int, num_tokens: int) -> None:
        """Add the largest other parts to that of a host until its KV has room for a request."""
        while self._capacity[part := self._part_of[host]] < num_tokens:
            others = [other for other in self._capacity if other != part]
            if not others:
                return
            self._merge(part, min(others, key=lambda other: (-self._capacity[other], other)))

    def _merge(self, part: int, other: int) -> None:
        if part == other:
            return
        first, last = sorted((part, other))
        self._part_of = [first if each == last else each for each in self._part_of]
        self._capacity[first] += self._capacity.pop(last)
