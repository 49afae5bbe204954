"""The facts by which the processes of several hosts find each other."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Network:
    """One process's view of the hosts.

    The process listens at `address`, an IP address of its own host, on a free port. `directory` is the
    "address:port" of the `PeerDirectory`. All processes know `secret`.
    """

    address: str
    directory: str
    secret: str = field(repr=False)
