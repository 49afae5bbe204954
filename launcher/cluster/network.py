"""The network between the hosts of one cluster."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from loong.executor.endpoints import RemoteReports
from loong.fabric.messages.network import Network
from loong.fabric.messages.peer_directory import PeerDirectory
from loong.messages.secure_sockets import new_secret


@dataclass(frozen=True, slots=True)
class ClusterNetwork:
    """The directory of all workers at the address of the head, and the secret of this start."""

    address: str
    directory: PeerDirectory
    secret: str = field(repr=False)

    def seen_from(self, address: str) -> Network:
        """Return the network as workers of the host with this address see it."""
        return Network(address, self.directory.endpoint, self.secret)

    @property
    def remote_reports(self) -> RemoteReports:
        """Return where workers of other hosts send reports."""
        return RemoteReports(f"tcp://{self.address}:*", self.secret)


@contextmanager
def cluster_network(address: str) -> Iterator[ClusterNetwork]:
    """A network whose head, this host, has `address`. Raises `ClusterError` if it is another host's."""
    secret = new_secret()
    with closing(PeerDirectory(address, secret)) as directory:
        yield ClusterNetwork(address, directory, secret)
