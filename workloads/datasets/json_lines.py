"""Files of a JSON object a line."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from loong.foreign_json import NOT_JSON
from loong.workloads.datasets.recording import bad

T = TypeVar("T")


def json_lines(path: Path, type: type[T]) -> Iterator[tuple[int, T]]:  # noqa: A002 - msgspec's word
    """Yield each line's number, from 1, and its object; empty lines are skipped.

    Raises:
        ConfigError: a line that is not JSON, or not of this type.
    """
    decoder = msgspec.json.Decoder(type)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, decoder.decode(line.removeprefix(b"\xef\xbb\xbf"))
            except NOT_JSON as error:
                raise bad(path, f"line {number}", str(error)) from error
