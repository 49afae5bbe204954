"""Reads a file of requests, whichever of the formats it has."""

import csv
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from loong.core.errors import ConfigError
from loong.foreign_json import NOT_JSON
from loong.workloads.datasets import azure, burstgpt
from loong.workloads.datasets.azure import read_azure
from loong.workloads.datasets.burstgpt import read_burstgpt
from loong.workloads.datasets.leval import read_leval
from loong.workloads.datasets.lveval import read_lveval
from loong.workloads.datasets.mooncake import read_mooncake
from loong.workloads.datasets.recording import RecordedTrace, bad
from loong.workloads.datasets.saved import read_saved
from loong.workloads.datasets.sharegpt import read_sharegpt

Reader = Callable[[Path], RecordedTrace]

# A file has the first format whose keys (or columns) are all in its first line.
JSON_LINES: tuple[tuple[frozenset[str], Reader], ...] = (
    (frozenset({"prompt", "num_output_tokens"}), read_saved),
    (frozenset({"timestamp", "input_length"}), read_mooncake),
    (frozenset({"instructions", "input"}), read_leval),
    (frozenset({"context", "input"}), read_lveval),
)
TABLES: tuple[tuple[frozenset[str], Reader], ...] = (
    (frozenset(azure.COLUMNS), read_azure),
    (frozenset(burstgpt.COLUMNS), read_burstgpt),
)
_NOT_KNOWN = (
    "the file is none of an Azure LLM trace or BurstGPT (CSV), a Mooncake trace, L-Eval, LV-Eval or loong's "
    "own (JSON lines), or ShareGPT (a JSON list)"
)
_MAX_NAMES, _MAX_NAME = 6, 32  # names that an error quotes, and characters of each


def read_recording(path: Path) -> RecordedTrace:
    """Read a file; its format shows in its first line. An unchanged file is not read twice in a row.

    Raises:
        ConfigError: no file, no format that is known, a line that is wrong, or no request.
    """
    try:
        status = path.stat()
        recording = _read(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if not recording.rows:
        raise ConfigError(f"{path} has no request that can be sent")
    return recording


@lru_cache(maxsize=4)
def _read(path: Path, _modified: int, _size: int) -> RecordedTrace:
    with path.open("rb") as file:
        first_line = next((line for line in file if line.strip()), b"")
    return _reader(path, first_line.removeprefix(b"\xef\xbb\xbf").strip())(path)


def _reader(path: Path, first_line: bytes) -> Reader:
    if first_line.startswith(b"["):
        return read_sharegpt
    if first_line.startswith(b"{"):
        kind, names, readers = "keys", _keys(path, first_line), JSON_LINES
    else:
        kind, names, readers = "columns", _columns(path, first_line), TABLES
    for needed, reader in readers:
        if needed <= set(names):
            return reader
    has = f"has the {kind} {_quoted(names)}" if names else "is empty"
    raise bad(path, "line 1", f"{has}; {_NOT_KNOWN}")


def _keys(path: Path, line: bytes) -> Sequence[str]:
    try:
        return list(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
    except NOT_JSON as error:
        raise bad(path, "line 1", f"{error}; {_NOT_KNOWN}") from error


def _columns(path: Path, line: bytes) -> Sequence[str]:
    try:
        return next(csv.reader([line.decode("utf-8", "replace")]), [])
    except csv.Error as error:
        raise bad(path, "line 1", f"{error}; {_NOT_KNOWN}") from error


def _quoted(names: Sequence[str]) -> str:
    """Return the first names in quotes, each cut to a bounded length."""
    cut = [name.strip() for name in names[:_MAX_NAMES]]
    shown = [repr(name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}...") for name in cut]
    return ", ".join(shown) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
