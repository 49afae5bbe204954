"""TCP connections between hosts, whose two ends prove to each other that they know the secret of this start.

The secret itself never travels: each end returns a keyed hash of random bytes that the other has chosen. Data
that follows is neither encrypted nor signed, so the network between hosts must be private.
"""

import hashlib
import hmac
import os
import socket

from loong.core.errors import ClusterError
from loong.fabric.messages.handshake import Handshake

HANDSHAKE_SECONDS = 5.0
BACKLOG = 1024  # connections that wait to be accepted
_MARK = b"loong\x00\x02\n"  # other protocols begin differently
_NUM_RANDOM_BYTES = 32
_NUM_HASH_BYTES = 32
_KEEPALIVE = (  # a host that vanished is noticed after 15 s, also where nothing is being sent
    (socket.TCP_KEEPIDLE, 5),
    (socket.TCP_KEEPINTVL, 2),
    (socket.TCP_KEEPCNT, 5),
    (socket.TCP_USER_TIMEOUT, 15_000),
)


class StrangerError(ClusterError):
    """The other end of a connection does not know the secret."""


def listen_at(address: str) -> socket.socket:
    """Return a socket that listens at an IP address of this host, on a free port."""
    try:
        return socket.create_server((address, 0), backlog=BACKLOG)
    except OSError as error:
        raise ClusterError(f"this host cannot listen at {address}: {error.strerror}") from error


def endpoint_of(listener: socket.socket) -> str:
    """Return the "address:port" of a listening socket."""
    address, port = listener.getsockname()[:2]
    return f"{address}:{port}"


def connect_to(endpoint: str, secret: str) -> Handshake:
    """Connect to "address:port", where the other end knows the secret, which it has proved when this returns.

    Raises OSError if nothing listens there or the listener drops it, and StrangerError if it does not know
    the secret.
    """
    address, _, port = endpoint.rpartition(":")
    connection = socket.create_connection((address, int(port)), HANDSHAKE_SECONDS)
    handshake = Handshake(connection, HANDSHAKE_SECONDS)
    try:
        _introduce(handshake, secret)
        _tune(connection)
    except BaseException:
        connection.close()
        raise
    return handshake


def _introduce(handshake: Handshake, secret: str) -> None:
    own = os.urandom(_NUM_RANDOM_BYTES)
    handshake.send(_MARK + own)
    answer = handshake.receive(_NUM_RANDOM_BYTES + _NUM_HASH_BYTES)
    theirs, proof = answer[:_NUM_RANDOM_BYTES], answer[_NUM_RANDOM_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"listener", own + theirs)):
        raise StrangerError("the proof of the listener is wrong")
    handshake.send(_proof(secret, b"caller", own + theirs))


def admit(handshake: Handshake, secret: str) -> None:
    """Prove to a caller that this process knows the secret, and let the caller prove the same.

    Raises StrangerError if it does not, also because it leaves, is too slow or was dropped.
    """
    try:
        greeting = handshake.receive(len(_MARK) + _NUM_RANDOM_BYTES)
        if not greeting.startswith(_MARK):
            raise StrangerError(f"it began with {greeting!r}")
        theirs, own = greeting[len(_MARK) :], os.urandom(_NUM_RANDOM_BYTES)
        handshake.send(own + _proof(secret, b"listener", theirs + own))
        proof = handshake.receive(_NUM_HASH_BYTES)
        if not hmac.compare_digest(proof, _proof(secret, b"caller", theirs + own)):
            raise StrangerError("its proof is wrong")
        handshake.prove()
        _tune(handshake.connection)
    except OSError as error:
        raise StrangerError(str(error)) from error


def _proof(secret: str, role: bytes, random_bytes: bytes) -> bytes:
    return hmac.digest(secret.encode(), role + random_bytes, hashlib.sha256)


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, number in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, number)
