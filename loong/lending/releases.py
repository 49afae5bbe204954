"""The end of loans: each instance with blocks of a request is asked until it answers that they are free."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from loong.core.placement import InstanceId
from loong.core.request import RequestId
from loong.lending.messages import Envelope, ReleaseBlocks
from loong.lending.peers import Peers
from loong.lending.recent import Recent


@dataclass(slots=True)
class Release:
    """A request that an instance has to release, its home, and when that was last said."""

    request_id: RequestId
    home_id: InstanceId
    instance_id: InstanceId
    sent_at: float


class Releases:
    """The releases without an answer, and the requests that are over, for as long as messages may be late."""

    def __init__(self, peers: Peers, retry_seconds: float, memory_seconds: float) -> None:
        self.open: dict[int, Release] = {}
        self._peers = peers
        self._retry_seconds = retry_seconds
        self._over = Recent[RequestId, bool](memory_seconds)

    def is_over(self, request_id: RequestId) -> bool:
        """Return whether a request has ended."""
        return request_id in self._over

    def end(self, request_id: RequestId, now: float) -> None:
        """Note that a request has ended."""
        self._over.set(request_id, True, now)

    def start(
        self, request_id: RequestId, home_id: InstanceId, kept_at: Iterable[InstanceId], now: float
    ) -> list[Envelope]:
        """Ask the instances that keep blocks of a request, or may do so soon, to release it."""
        self.end(request_id, now)
        sent = list[Envelope]()
        for instance_id in sorted(kept_at):
            number = self._peers.new_number()
            body = ReleaseBlocks(request_id)
            if message := self._peers.message(home_id, instance_id, number, body):
                self.open[number] = Release(request_id, home_id, instance_id, now)
                sent += message
        return sent

    def confirmed(self, number: int) -> None:
        """Note that an instance has released a request."""
        self.open.pop(number, None)

    def lost(self, instance_id: InstanceId) -> None:
        """Forget what an instance was to release."""
        self.open = {n: r for n, r in self.open.items() if r.instance_id != instance_id}

    def tick(self, now: float) -> Iterator[Envelope]:
        """Ask again where there is no answer."""
        for number, release in self.open.items():
            if release.sent_at + self._retry_seconds <= now:
                release.sent_at = now
                body = ReleaseBlocks(release.request_id)
                yield from self._peers.message(release.home_id, release.instance_id, number, body)
