"""Reader of decision logs."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from loong.core.errors import ConfigError
from loong.foreign_json import NOT_JSON
from loong.observability.decision_log.lines import VERSION, Line, StartedLine

logger = logging.getLogger(__name__)

_FIRST_OF_RUN = b'{"line":"started"'  # quotes in strings are escaped, so no other line contains this


def read_log(path: Path) -> tuple[Line, ...]:
    """Return the lines of the last run in a file, from its `StartedLine` on.

    Raises `ConfigError` naming the file, and the line if one is damaged. An incomplete last line is left out,
    because it is still being written.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if not data:
        raise ConfigError(f"{path} is empty")
    start = data.rfind(_FIRST_OF_RUN)
    *whole, rest = data[max(start, 0) :].split(b"\n")
    if start < 0 or not whole:
        raise ConfigError(f"{path} is not a decision log")
    first_number = data.count(b"\n", 0, start) + 1
    if rest:
        logger.warning("%s:%d is not complete, and is left out", path, first_number + len(whole))
    return tuple(_decoded(whole, path, first_number))


def _decoded(lines: Iterable[bytes], path: Path, first_number: int) -> Iterator[Line]:
    """Yield each decoded line.

    Raises `ConfigError` with the place of a line that is damaged or of another version.
    """
    decoder = msgspec.json.Decoder(Line)
    for number, raw in enumerate(lines, first_number):
        try:
            line = decoder.decode(raw)
        except NOT_JSON as error:
            raise ConfigError(f"{path}:{number} is damaged: {error}") from None
        if isinstance(line, StartedLine) and line.version != VERSION:
            raise ConfigError(
                f"{path}:{number} begins version {line.version}, but this loong reads {VERSION}"
            )
        yield line
