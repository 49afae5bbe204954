"""The links between the hosts of a cluster, by what they cost more than links within a host."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from loong.core.cost.work import InstanceWork, StepWork
from loong.core.placement import InstanceId


@dataclass(frozen=True, slots=True)
class LinkRates:
    """A kind of link: bytes a second one way, and the seconds of a message."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class Links:
    """The links between two instances, by kind."""

    within_host: LinkRates
    between_hosts: LinkRates


@dataclass(frozen=True, slots=True)
class Network:
    """The hosts of instances, and how slow links between hosts are.

    `host_ids` has the host of each instance, and is empty where there is one host. What travels between hosts
    takes `slowdown` times as long as within one. `delay` seconds are added to a step in which queries travel
    between hosts, and for each hop of a ring that does. `message` seconds are added to a migration.
    """

    host_ids: tuple[int, ...] = ()
    slowdown: float = 1.0
    delay: float = 0.0
    message: float = 0.0

    @classmethod
    def of(cls, host_ids: tuple[int, ...], links: Links, num_layers: int) -> "Network":
        """Return the network of instances with these links. No link between hosts is better than within."""
        if len(set(host_ids)) < 2:
            return ONE_HOST
        near, far = links.within_host, links.between_hosts
        latency = max(0.0, far.latency - near.latency)
        slowdown = max(1.0, near.bandwidth / far.bandwidth)
        return cls(host_ids, slowdown, num_layers * latency, message=latency)

    @property
    def most_on_host(self) -> int:
        """Return the most instances of a host."""
        return max(Counter(self.host_ids).values())

    def host_of(self, instance_id: InstanceId) -> int:
        """Return the host of an instance, or of a host tier, which is its instance's."""
        return self.host_ids[instance_id % len(self.host_ids)] if self.host_ids else 0

    def spans(self, instance_ids: Iterable[InstanceId]) -> bool:
        """Return whether instances are on different hosts."""
        return len({self.host_of(i) for i in instance_ids}) > 1

    def slowed(self, work: StepWork) -> StepWork:
        """Return `work` with its counts of transfers scaled up, so that rates within a host predict it.

        The members of a ring advance together, so each hop takes as long as the slowest. Queries go to all
        others alike.
        """
        everyone = (*work.instances, *work.holders)
        ring = self.slowdown if work.has_ring and self.spans(work.instances) else 1.0

        def slowed(parts: Mapping[InstanceId, InstanceWork]) -> dict[InstanceId, InstanceWork]:
            return {
                i: replace(
                    part,
                    num_ring_keys=round(part.num_ring_keys * ring),
                    num_sent_queries=round(part.num_sent_queries * self._query_factor(i, everyone)),
                )
                for i, part in parts.items()
            }

        return replace(work, instances=slowed(work.instances), holders=slowed(work.holders))

    def seconds(self, work: StepWork) -> float:
        """Return the delays that links between hosts add to a step."""
        seconds = 0.0
        if work.has_exchange and self.spans((*work.instances, *work.holders)):
            seconds += self.delay
        if work.has_ring and self.spans(work.instances):
            seconds += self.delay * (work.group.dop - 1)
        return seconds

    def query_factor(self, dop: int) -> float:
        """Return how much longer queries travel in a group with more instances than a host has."""
        return 1.0 + (self.slowdown - 1.0) * (dop - self.most_on_host) / (dop - 1)

    def _query_factor(self, instance_id: InstanceId, everyone: tuple[InstanceId, ...]) -> float:
        own = self.host_of(instance_id)
        num_remote = sum(self.host_of(i) != own for i in everyone)
        return 1.0 + (self.slowdown - 1.0) * num_remote / max(1, len(everyone) - 1)


ONE_HOST = Network()
