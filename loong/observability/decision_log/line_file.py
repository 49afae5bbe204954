"""A file of lines whose write errors never reach the caller."""

import logging
from io import FileIO
from pathlib import Path
from time import monotonic

from loong.core.errors import ConfigError
from loong.one_writer import claim
from loong.private_files import private

logger = logging.getLogger(__name__)

MAX_BUFFERED_BYTES = 1 << 16
MAX_BUFFERED_SECONDS = 1.0


class LineFile:
    """Appends whole lines, many at a time.

    A file that cannot be opened raises `ConfigError`, and so does one that another process writes. A later
    write error is logged once, and ends the file.
    """

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        """Open a file, which must not exist if it `is_new`."""
        self._path = path
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._flushed_at = monotonic()
        try:
            self._file = FileIO(path, "x" if is_new else "a", opener=private)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        try:
            if path.is_file():  # no device
                claim(self._file.fileno(), str(path))
        except ConfigError:
            self._file.close()
            raise

    def append(self, line: bytes) -> None:
        """Add a line, given without its line break."""
        self._lines += (line, b"\n")
        self._num_bytes += len(line) + 1
        if self._num_bytes > MAX_BUFFERED_BYTES or monotonic() - self._flushed_at > MAX_BUFFERED_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write all lines to the file."""
        data = b"".join(self._lines)
        self._lines.clear()
        self._num_bytes, self._flushed_at = 0, monotonic()
        try:
            while data and not self._file.closed:
                data = data[self._file.write(data) :]
        except OSError as error:
            logger.warning("%s ends here: %s", self._path, error.strerror)
            self._file.close()

    def close(self) -> None:
        """Write the remaining lines, and close the file."""
        self.flush()
        self._file.close()
