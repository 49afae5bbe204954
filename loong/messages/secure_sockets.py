"""ZeroMQ sockets over TCP, between hosts: encrypted, and only for those that know the secret of this start.

The secret is the private key of a CURVE key pair that all processes share. Without it no process has the
public key either, which both ends of a handshake need.
"""

from collections.abc import Callable
from threading import Thread
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from loong.core.errors import ConfigError
from loong.messages.stray_frames import StrayFrames

_HANDSHAKE_MS = 5000  # for a caller, of whatever kind
_CROWDED_HANDSHAKE_MS = 60_000  # for a listener, which may have many strangers to end before
_BACKLOG = 1024  # connections that wait to be accepted
_KEEPALIVE = (  # a host that vanished is noticed after 15 s
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 5),
    (zmq.TCP_KEEPALIVE_INTVL, 2),
    (zmq.TCP_KEEPALIVE_CNT, 5),
    (zmq.TCP_MAXRT, 15_000),
)
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)


def new_secret() -> str:
    """Return a secret for one start. Raises `ConfigError` if the installed ZeroMQ cannot encrypt."""
    if not zmq.has("curve"):
        raise ConfigError(
            "several hosts need a ZeroMQ with CURVE, which the installed pyzmq lacks; "
            "that of `pip install pyzmq` has it"
        )
    _, secret = zmq.curve_keypair()
    return secret.decode()


def is_wildcard(endpoint: str) -> bool:
    """Return whether an endpoint has a port only once a socket listens there."""
    return endpoint.endswith(":*")


def listen_securely(socket: "zmq.Socket[bytes]", endpoint: str, secret: str) -> str:
    """Bind a socket to `tcp://ADDRESS:*`. Return the endpoint with its port.

    Raises `ConfigError` if the address is none of this host.
    """
    _prepare(socket, secret)
    socket.curve_server = True
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.BACKLOG, _BACKLOG)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"this host cannot listen at {endpoint}: {error.strerror}") from error
    last = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(last, bytes), "of this option"
    return last.rstrip(b"\0").decode()


def connect_securely(socket: "zmq.Socket[bytes]", endpoint: str, secret: str) -> None:
    """Connect a socket to the endpoint of `listen_securely`.

    A connection that breaks is not made again: messages of the time between would be missing.
    """
    _prepare(socket, secret)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _CROWDED_HANDSHAKE_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.curve_serverkey = zmq.curve_public(secret.encode())
    socket.connect(endpoint)


class ConnectionWatch:
    """Counts connections that a listening socket refuses, and reports when a peer leaves; a thread.

    Make it before the socket listens. `on_left` is called when one that had proved the secret is gone.
    ZeroMQ does not say which connection has proved it. It is one of those that were open then, and the others
    of these end with the time for their handshakes.
    """

    def __init__(
        self, socket: "zmq.Socket[bytes]", strays: StrayFrames, on_left: Callable[[], None] = lambda: None
    ) -> None:
        self._socket, self._strays, self._on_left = socket, strays, on_left
        self._monitor = socket.get_monitor_socket()
        self._open = set[int]()  # descriptors
        self._may_be_proved = set[int]()  # those of them that were open when one had proved the secret
        self._num_proved = 0  # of these
        self._is_refused = False  # the connection that ends next
        self._thread = Thread(target=self._run, name="connection-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching, before the socket is closed."""
        self._socket.disable_monitor()
        self._thread.join()

    def _run(self) -> None:
        with self._monitor:
            while True:
                message = recv_monitor_message(self._monitor)
                if message["event"] == zmq.EVENT_MONITOR_STOPPED:
                    return
                self._take(message["event"], message["value"])

    def _take(self, event: int, number: Any) -> None:  # Any: of ZeroMQ, by the kind of event
        if event == zmq.EVENT_ACCEPTED:
            self._open.add(number)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._num_proved += 1
            self._may_be_proved |= self._open
        elif event in _REFUSED:
            self._is_refused = True  # a handshake does not name its connection; its end, which follows, does
        elif event == zmq.EVENT_DISCONNECTED:
            self._end(number)

    def _end(self, descriptor: int) -> None:
        is_stranger = self._is_refused or descriptor not in self._may_be_proved
        self._is_refused = False
        self._open.discard(descriptor)
        self._may_be_proved.discard(descriptor)
        if len(self._may_be_proved) < self._num_proved:
            self._num_proved -= 1
            self._on_left()
        elif is_stranger or len(self._may_be_proved) == self._num_proved:
            self._strays.drop("a connection without the secret", f"number {descriptor}")


def _prepare(socket: "zmq.Socket[bytes]", secret: str) -> None:
    socket.curve_secretkey = secret.encode()
    socket.curve_publickey = zmq.curve_public(secret.encode())
    for option, number in _KEEPALIVE:
        socket.setsockopt(option, number)
