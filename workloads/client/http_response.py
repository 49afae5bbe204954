"""HTTP/1.1 responses: bytes in, the bytes of the body out, as they arrive."""

from collections.abc import Mapping
from enum import Enum

MAX_HEAD_BYTES = 65_536


class HTTPFormatError(Exception):
    """The received bytes are no HTTP/1.1 response."""


class _Framing(Enum):
    """The rule that ends a body."""

    LENGTH = "length"
    CHUNKED = "chunked"
    CLOSE = "close"


class ResponseParser:
    """Reads one response, in pieces of any size. `status` is 0 until the head is complete."""

    def __init__(self) -> None:
        self.status = 0
        self.is_complete = False
        self.keeps_alive = False
        self._rest = b""
        self._framing = _Framing.CLOSE
        self._num_left = 0  # bytes of the body, or of the chunk
        self._is_in_trailers = False

    def feed(self, received: bytes) -> bytes:
        """Take more bytes; return the part of the body in them.

        Raises:
            HTTPFormatError: they are no response, or go on after its end.
        """
        self._rest += received
        if not self.status and not self._read_head():
            return b""
        match self._framing:
            case _Framing.CLOSE:
                body, self._rest = self._rest, b""
            case _Framing.LENGTH:
                body, self._rest = self._rest[: self._num_left], self._rest[self._num_left :]
                self._num_left -= len(body)
                self.is_complete = self._num_left == 0
            case _Framing.CHUNKED:
                body = self._read_chunks()
        if self.is_complete and self._rest:
            raise HTTPFormatError("the server sent more than the response")
        return body

    def end(self) -> None:
        """Take the end of the connection.

        Raises:
            HTTPFormatError: the response was to go on.
        """
        if not self.status:
            raise HTTPFormatError("the connection was closed without a response")
        if self._framing is not _Framing.CLOSE and not self.is_complete:
            raise HTTPFormatError("the connection was closed in the middle of the response")
        self.is_complete = True

    def _read_head(self) -> bool:
        """Read status and headers, past informational ones; False if there is more to come."""
        while True:
            head, separator, rest = self._rest.partition(b"\r\n\r\n")
            if not separator:
                if len(self._rest) > MAX_HEAD_BYTES:
                    raise HTTPFormatError(f"the head of the response is longer than {MAX_HEAD_BYTES} bytes")
                return False
            self._rest = rest
            status_line, *lines = head.decode("latin-1").split("\r\n")
            version, _, status = status_line.partition(" ")
            if not version.startswith("HTTP/1.") or not status[:3].isdigit():
                raise HTTPFormatError(f"{status_line[:80]!r} is no status of HTTP/1.1")
            if not status.startswith("1"):
                self._take_head(version, int(status[:3]), _headers(lines))
                return True

    def _take_head(self, version: str, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        connection = headers.get("connection", "keep-alive" if version == "HTTP/1.1" else "close").lower()
        if headers.get("transfer-encoding", "").lower() == "chunked":
            self._framing = _Framing.CHUNKED
        elif status in (204, 304):
            self._framing, self.is_complete = _Framing.LENGTH, True
        elif "content-length" in headers:
            self._framing, self._num_left = _Framing.LENGTH, _number(headers["content-length"], base=10)
            self.is_complete = self._num_left == 0
        self.keeps_alive = connection != "close" and self._framing is not _Framing.CLOSE

    def _read_chunks(self) -> bytes:
        """Take the complete part of the current line or chunk, and go on to the next."""
        parts = []
        while self._rest and not self.is_complete:
            if self._num_left:
                part, self._rest = self._rest[: self._num_left], self._rest[self._num_left :]
                self._num_left -= len(part)
                parts.append(part)
                continue
            line, separator, rest = self._rest.partition(b"\r\n")
            if not separator:
                break
            self._rest = rest
            if self._is_in_trailers:
                self.is_complete = not line
            elif line:  # an empty one ends a chunk
                self._num_left = _number(line.partition(b";")[0].decode("latin-1"), base=16)
                self._is_in_trailers = not self._num_left
        return b"".join(parts)


def _headers(lines: list[str]) -> dict[str, str]:
    named = (line.partition(":") for line in lines)
    return {name.strip().lower(): value.strip() for name, _, value in named}


def _number(text: str, base: int) -> int:
    try:
        number = int(text, base)
    except ValueError:
        number = -1
    if number < 0:
        raise HTTPFormatError(f"{text[:80]!r} is no length")
    return number
