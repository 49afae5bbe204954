"""One end of a stream of messages between two processes of this host. A message may carry a socket."""

import socket
import struct

_SIZE = struct.Struct("<I")  # bytes of the message that follows


class Connection:
    """Sends and receives whole messages. Each method raises EOFError if the other end is gone."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    @classmethod
    def pair(cls) -> "tuple[Connection, Connection]":
        """Return both ends of a new stream."""
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    def send(self, message: bytes, carried: "Connection | None" = None) -> None:
        """Send a message, with an end of another stream."""
        descriptors = [] if carried is None else [carried.socket.fileno()]
        try:
            socket.send_fds(self.socket, [_SIZE.pack(len(message))], descriptors)
            self.socket.sendall(message)
        except ConnectionError as error:
            raise EOFError from error

    def receive(self, seconds: float | None = None) -> "tuple[bytes, Connection | None]":
        """Return the next message, and the stream that came with it.

        Raises TimeoutError if it does not come within `seconds`.
        """
        self.socket.settimeout(seconds)
        try:
            header, descriptors, *_ = socket.recv_fds(self.socket, _SIZE.size, 1)
            header += self._exactly(_SIZE.size - len(header))
            message = self._exactly(*_SIZE.unpack(header))
        except ConnectionError as error:
            raise EOFError from error
        carried = Connection(socket.socket(fileno=descriptors[0])) if descriptors else None
        return message, carried

    def close(self) -> None:
        """Close this end."""
        self.socket.close()

    def _exactly(self, num_bytes: int) -> bytes:
        parts = bytearray()
        while len(parts) < num_bytes:
            part = self.socket.recv(min(num_bytes - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)
