"""The device links of one process: made when both ends meet, ended when a transfer cannot end by itself.

A communicator has no batches, so its two ends agree before its first use in each batch or migration: each
sends its state when it opens that. If the states do not fit, because a transfer was never received or a
process is new, both make a new communicator. So late messages end with the old one. Links to other peers go
on.
"""

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Thread
from time import monotonic, sleep

import torch
import torch.distributed as dist
from torch import Tensor

from loong.core.errors import ClusterError
from loong.fabric.device_links.communicator import Communicator, ConnectCommunicator
from loong.fabric.device_links.device_link import DeviceLink, LinkState
from loong.fabric.device_links.pair_store import PairStore
from loong.fabric.errors import DeadlineError, InvalidMessageError
from loong.fabric.messages.link import bytes_of, memory_of
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.protocol import Pending
from loong.fabric.traffic import Channel, Plane

_LOOK_SECONDS = 0.02
_STATE, _ENTRY = b"state ", b"entry "  # the kinds of messages on the channels of links


@dataclass(slots=True)
class _Use:
    """The open batch or migration of a plane, and its links by peer."""

    plane: Plane
    its_id: int
    links: Mapping[int, DeviceLink]
    states: Mapping[int, LinkState]  # sent when it was opened
    agreed: set[int] = field(default_factory=set)
    error: ClusterError | None = None


class DeviceLinks:
    """The links to `peers`, by rank. `connect` makes their communicators.

    `sockets` carries what the ends agree on, and reports members that are lost or have left.
    """

    def __init__(self, sockets: SocketFabric, peers: Collection[int], connect: ConnectCommunicator) -> None:
        self.peers = frozenset(peers)
        self._sockets, self._connect = sockets, connect
        world, rank = sockets.world, sockets.rank
        self._links: dict[tuple[Plane, int], DeviceLink] = {}
        for peer in sorted(peers, key=self._turn):
            is_counterpart = world.tp_rank(peer) == world.tp_rank(rank)
            for plane in (Plane.BATCH, Plane.MIGRATION) if is_counterpart else (Plane.BATCH,):
                self._links[plane, peer] = DeviceLink(self._name(peer))
        self._num_met = dict.fromkeys(peers, 0)
        self._uses: dict[Plane, _Use | None] = dict.fromkeys(Plane)
        self._is_closed, self._changed = False, Event()
        sockets.watch(self._changed.set)
        Thread(target=self._keep_watch, name="fabric-links", daemon=True).start()

    def meet(self) -> None:
        """Make the links to all peers that have joined since the last time. The peers do the same."""
        new = {peer for peer in self.peers if self._sockets.num_joins(peer) != self._num_met[peer]}
        for (plane, peer), link in self._links.items():
            if peer in new:
                self._post_state(Channel.START_LINK, plane, peer, link.state)
                own, theirs = link.state, self._receive_state(Channel.START_LINK, plane, peer)
                self._make(Channel.START_LINK, plane, peer, link, 1 + max(own.generation, theirs.generation))
        self._num_met |= {peer: self._sockets.num_joins(peer) for peer in new}

    @contextmanager
    def open(self, plane: Plane, its_id: int, ranks: Collection[int]) -> Iterator[None]:
        """Open a batch or migration of these ranks, which `sockets` has opened."""
        links = {peer: self._links[plane, peer] for peer in ranks if (plane, peer) in self._links}
        states = {peer: link.state for peer, link in links.items()}
        for peer, state in states.items():
            self._post_state(plane.link, its_id, peer, state)
        use = self._uses[plane] = _Use(plane, its_id, links, states)
        self._changed.set()
        try:
            yield
            self.check(plane)
        except BaseException:
            self._abort_unfinished(use)
            raise
        finally:
            self._uses[plane] = None

    def check(self, plane: Plane) -> None:
        """Raise the error that has ended transfers of the open batch or migration."""
        if (use := self._uses[plane]) is not None and use.error is not None:
            raise use.error

    def transfer(self, sent: Mapping[int, Tensor], come: Mapping[int, Tensor], channel: Channel) -> Pending:
        """Begin to send and receive tensors, by peer, in the open batch or migration.

        All ranks take their links in one order. So no two wait for each other, even if a device carries out
        one transfer after the other.
        """
        plane = channel.plane
        if (use := self._uses[plane]) is None:
            raise InvalidMessageError(f"no {plane.name.lower()} is open")
        self.check(plane)
        works: list[tuple[DeviceLink, dist.Work]] = []
        for peer in sorted({*sent, *come}, key=self._turn):
            link = use.links[peer]
            if peer not in use.agreed:
                self._agree(use, peer, link)
            begun = link.transfer(sent.get(peer), come.get(peer))
            if begun is None:
                raise self._failure(use)
            works += [(link, work) for work in begun]
        for tensor in sent.values():
            self._sockets.traffic.count(channel, tensor.nbytes)
        return _LinkTransfer(self, use, works, (*sent.values(), *come.values()))

    def close(self) -> None:
        """End all links."""
        self._is_closed = True
        self._changed.set()
        for link in self._links.values():
            link.abort()

    def _turn(self, peer: int) -> tuple[int, int]:
        """Return the place of the pair of this process and a peer in the order of all pairs."""
        return min(peer, self._sockets.rank), max(peer, self._sockets.rank)

    def _agree(self, use: _Use, peer: int, link: DeviceLink) -> None:
        """Agree with a peer on the link's next use, and make it anew unless both ends fit."""
        own, theirs = use.states[peer], self._receive_state(use.plane.link, use.its_id, peer)
        if not own.fits(theirs):
            generation = 1 + max(own.generation, theirs.generation)
            self._make(use.plane.link, use.its_id, peer, link, generation)
        use.agreed.add(peer)

    def _make(self, channel: Channel, its_id: int, peer: int, link: DeviceLink, generation: int) -> None:
        """Make a link anew, as the peer does at the same time, in a thread that is left alone if it hangs."""
        link.renew(generation)
        store = PairStore(
            partial(self._post, channel, its_id, peer, _ENTRY),
            partial(self._receive, channel, its_id, peer, _ENTRY),
        )
        made = Future[Communicator]()
        index = int(self._sockets.rank > peer)

        def make() -> None:
            try:
                made.set_result(self._connect(store, index))
            except BaseException as error:  # noqa: BLE001 - for the thread that waits
                made.set_exception(error)

        Thread(target=make, name="fabric-connect", daemon=True).start()
        end = monotonic() + self._sockets.deadline
        try:
            while not made.done():
                self._sockets.raise_if_broken(channel.plane, its_id)
                self._raise_if_after(end, "connecting", peer)
                with suppress(TimeoutError):
                    made.exception(_LOOK_SECONDS)
            link.use(made.result())
        except BaseException as error:
            made.add_done_callback(_abort_result)
            if isinstance(error, RuntimeError) and not isinstance(error, ClusterError):
                raise self._unconnected(channel, its_id, peer, error) from error
            raise
        finally:
            store.close()

    def _raise_if_after(self, end: float, verb: str, peer: int) -> None:
        if monotonic() > end:
            raise DeadlineError(verb, *self._sockets.world.place(peer), self._sockets.deadline)

    def _unconnected(self, channel: Channel, its_id: int, peer: int, error: RuntimeError) -> ClusterError:
        """Return why a communicator could not be made: a loss, or what its backend says."""
        sleep(_LOOK_SECONDS)
        try:
            self._sockets.raise_if_broken(channel.plane, its_id)
        except ClusterError as lost:
            return lost
        return ClusterError(f"there is no communicator with {self._name(peer)}: {error}")

    def _name(self, peer: int) -> str:
        return "instance {} (tensor-parallel rank {})".format(*self._sockets.world.place(peer))

    def _post_state(self, channel: Channel, its_id: int, peer: int, state: LinkState) -> None:
        self._post(channel, its_id, peer, _STATE, bytes(memory_of(torch.tensor(state, device="cpu"))))

    def _receive_state(self, channel: Channel, its_id: int, peer: int) -> LinkState:
        try:
            message = self._receive(channel, its_id, peer, _STATE)
        except ClusterError:
            self._sockets.raise_if_broken(channel.plane, its_id)  # by the name of the verb
            raise
        return LinkState(*torch.frombuffer(bytearray(message), dtype=torch.int64).tolist())

    def _post(self, channel: Channel, its_id: int, peer: int, kind: bytes, message: bytes) -> None:
        payload = torch.frombuffer(bytearray(kind + message), dtype=torch.uint8)
        self._sockets.post(channel, its_id, peer, payload)

    def _receive(self, channel: Channel, its_id: int, peer: int, kind: bytes) -> bytes:
        """Return the next message of a kind, and drop those of another: they are left from earlier."""
        while True:
            message = bytes(memory_of(bytes_of(self._sockets.receive(channel, its_id, peer))))
            if message.startswith(kind):
                return message[len(kind) :]

    def _keep_watch(self) -> None:
        """End transfers whose peer is lost, has left, or is too late."""
        while not self._is_closed:
            self._changed.wait(_LOOK_SECONDS if any(self._uses.values()) else None)
            self._changed.clear()
            for use in tuple(self._uses.values()):
                if use is not None and use.error is None:
                    self._look(use)

    def _look(self, use: _Use) -> None:
        silent = {
            peer: seconds
            for peer, link in use.links.items()
            if (seconds := link.silent_seconds()) is not None
        }
        if not silent:
            return
        try:
            self._sockets.raise_if_broken(use.plane, use.its_id)
            peer = max(silent, key=silent.__getitem__)
            end = monotonic() - silent[peer] + self._sockets.deadline
            self._raise_if_after(end, f"{use.plane.name.lower()} {use.its_id}", peer)
        except ClusterError as error:
            use.error = error
            self._abort_unfinished(use)

    def _abort_unfinished(self, use: _Use) -> None:
        for link in use.links.values():
            if link.silent_seconds() is not None:
                link.abort()

    def _failure(self, use: _Use) -> ClusterError:
        """Return the reason why a link of a batch or migration broke, once it is known."""
        end = monotonic() + self._sockets.deadline
        while monotonic() < end:
            if use.error is not None:
                return use.error
            try:
                self._sockets.raise_if_broken(use.plane, use.its_id)
            except ClusterError as error:
                return error
            sleep(_LOOK_SECONDS)
        return ClusterError(f"a link of {use.plane.name.lower()} {use.its_id} broke")


@dataclass(frozen=True, slots=True)
class _LinkTransfer:
    """Transfers that were begun together: a Pending. It keeps the tensors alive."""

    links: DeviceLinks
    use: _Use
    works: Collection[tuple[DeviceLink, dist.Work]]
    tensors: Collection[Tensor]

    def wait(self) -> None:
        """See Pending."""
        for link, work in self.works:
            try:
                work.wait()
            except RuntimeError as error:  # the backend's own, of a link that broke
                link.abort()
                raise self.links._failure(self.use) from error
        if self.use.error is not None:
            raise self.use.error


def _abort_result(made: "Future[Communicator]") -> None:
    if made.exception() is None:
        made.result().abort()
