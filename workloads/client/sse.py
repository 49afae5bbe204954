"""Server-sent events: bytes in, the data of each complete event out."""


class EventDecoder:
    """Cuts a byte stream, in pieces of any size, into events; comments and other fields are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, received: bytes) -> list[str]:
        """Take more bytes; return the data of the events they complete, in order."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        events = []
        for raw in lines:
            line = raw.removesuffix(b"\r").decode("utf-8", errors="replace")
            if line.startswith("data:"):
                self._data.append(line[len("data:") :].removeprefix(" "))
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events
