"""The header of a GGUF file: its metadata, and the places of its tensors.

Source: GGUF's specification, versions 2 and 3. Every worker reads a whole vocabulary with it, so arrays of
strings are read in one loop over the mapped file. Every number of a file may be wrong or hostile, so each is
checked before memory is allocated for it.
"""

import io
import mmap
import struct
from collections.abc import Container
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Final, TypeAlias

from loong.core.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
MAX_BYTES: Final = 2**28
MAX_NAMES: Final = 2**16  # of values, and of tensors
MAX_NAME_LETTERS: Final = 256
MAX_ITEMS: Final = 2**22  # of all arrays together
MAX_ALIGNMENT: Final = 2**20
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4

Scalar: TypeAlias = bool | int | float | str
Value: TypeAlias = Scalar | list[Scalar]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: its shape [rows, columns], the number of its type in ggml, and the offset of its bytes."""

    shape: tuple[int, ...]
    ggml_type: int
    offset: int

    @property
    def num_elements(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """The content of a GGUF file of `file_bytes` before its tensors, which begin at byte `size`."""

    path: Path
    values: dict[str, Value]
    tensors: dict[str, TensorInfo]
    size: int
    file_bytes: int


def read_header(path: Path) -> Header:
    """Return a file's header.

    Raises ConfigError if the file cannot be read, is not GGUF, is cut short, or has a number that no such
    file can have.
    """
    try:
        with path.open("rb") as file:
            num_bytes = file.seek(0, io.SEEK_END)
            with mmap.mmap(file.fileno(), min(num_bytes, MAX_BYTES), access=mmap.ACCESS_READ) as data:
                return _Cursor(path, data, num_bytes).header()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ConfigError:  # which is a ValueError, too
        raise
    except ValueError as error:  # an empty file, which cannot be mapped, or text that is not UTF-8
        raise ConfigError(f"{path} is not a GGUF file: {error}") from error
    except (struct.error, IndexError) as error:
        raise ConfigError(
            f"{path} is not a complete GGUF file: its header is cut short, damaged, or longer than "
            f"{MAX_BYTES:,} bytes"
        ) from error


class _Cursor:
    """A position in a mapped file, which advances with each value that is read."""

    def __init__(self, path: Path, data: mmap.mmap, file_bytes: int) -> None:
        self._path, self._data, self._file_bytes = path, data, file_bytes
        self._at = self._num_items = 0

    def header(self) -> Header:
        if self._data[:4] != _MAGIC:
            raise ConfigError(f"{self._path} is not a GGUF file: it begins with {bytes(self._data[:4])!r}")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ConfigError(f"{self._path} must be GGUF of version 2 or 3, little-endian, got {version}")
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        for what, count in (("tensors", num_tensors), ("values", num_values)):
            if count > MAX_NAMES:
                raise ConfigError(f"{self._path} must have at most {MAX_NAMES:,} {what}, got {count:,}")
        values: dict[str, Value] = {}
        for _ in range(num_values):
            key = self._new_name(values)
            values[key] = self._value(key, self._scalar("I"))
        infos: dict[str, TensorInfo] = {}
        for _ in range(num_tensors):
            name = self._new_name(infos)
            infos[name] = self._tensor_info(name)
        alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise ConfigError(
                f"{self._path}: general.alignment must be a power of two up to {MAX_ALIGNMENT:,}, "
                f"got {alignment!r:.80}"
            )
        size = -(-self._at // alignment) * alignment
        tensors = {name: replace(info, offset=size + info.offset) for name, info in infos.items()}
        return Header(self._path, values, tensors, size, self._file_bytes)

    def _new_name(self, known: Container[str]) -> str:
        """Return the next string, of which a file must have one alone."""
        name = self._string()
        if len(name) > MAX_NAME_LETTERS:
            raise ConfigError(
                f"{self._path} has a name of {len(name):,} letters, and {MAX_NAME_LETTERS} are the most"
            )
        if name in known:
            raise ConfigError(f"{self._path} has {name!r} twice")
        return name

    def _tensor_info(self, name: str) -> TensorInfo:
        num_dimensions = self._scalar("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ConfigError(
                f"{self._path}: {name} must have 1 to {_MAX_DIMENSIONS} dimensions, got {num_dimensions}"
            )
        shape = self._many("Q", num_dimensions)[::-1]  # ggml names the fastest dimension first
        info = TensorInfo(shape, self._scalar("I"), self._scalar("Q"))
        most = 8 * self._file_bytes  # no type takes less than a bit for an element
        if not 1 <= info.num_elements <= most or info.offset > self._file_bytes:
            raise ConfigError(
                f"{self._path} of {self._file_bytes:,} bytes cannot hold {name} of shape {list(shape)} at "
                f"{info.offset}"
            )
        return info

    def _value(self, key: str, value_type: int) -> Value:
        if value_type == _STRING:
            return self._string()
        if value_type != _ARRAY:
            return self._many(self._code(key, value_type), 1)[0]
        item_type, length = self._scalar("I"), self._scalar("Q")
        self._num_items += length
        if self._num_items > MAX_ITEMS:
            raise ConfigError(
                f"{self._path} must have at most {MAX_ITEMS:,} items in arrays, but {key} ends at item "
                f"{self._num_items:,}"
            )
        if item_type == _STRING:
            return self._strings(length)
        return list(self._many(self._code(f"an item of {key}", item_type), length))

    def _code(self, what: str, value_type: int) -> str:
        code = _SCALARS.get(value_type)
        if code is None:
            raise ConfigError(f"{self._path}: {what} has type {value_type}, which is not supported")
        return code

    def _many(self, code: str, count: int) -> tuple[int, ...]:
        values = struct.unpack_from(f"<{count}{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{count}{code}")
        return values

    def _scalar(self, code: str) -> int:
        return self._many(code, 1)[0]

    def _string(self) -> str:
        (string,) = self._strings(1)
        return str(string)

    def _strings(self, count: int) -> list[Scalar]:
        data, at, unpack = self._data, self._at, struct.Struct("<Q").unpack_from
        strings: list[Scalar] = []
        for _ in range(count):
            (length,) = unpack(data, at)
            end = at + 8 + length
            if end > len(data):
                raise IndexError(f"a string ends at byte {end} of {len(data)}")
            strings.append(data[at + 8 : end].decode())
            at = end
        self._at = at
        return strings
