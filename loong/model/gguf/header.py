"""The header of a GGUF file: its metadata, and the places of its tensors.

Source: GGUF's specification, versions 2 and 3. Every worker reads a whole vocabulary with it, so arrays of
strings are read in one loop over the mapped file.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeAlias

from loong.core.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
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
    """The content of a GGUF file before its tensors, which begin at byte `size`."""

    path: Path
    values: dict[str, Value]
    tensors: dict[str, TensorInfo]
    size: int


def read_header(path: Path) -> Header:
    """Return a file's header. Raises ConfigError if the file cannot be read, is not GGUF, or is cut short."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(path, data).header()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ConfigError:  # which is a ValueError, too
        raise
    except ValueError as error:  # an empty file, which cannot be mapped, or text that is not UTF-8
        raise ConfigError(f"{path} is not a GGUF file: {error}") from error
    except (struct.error, IndexError, OverflowError) as error:
        raise ConfigError(
            f"{path} is not a complete GGUF file: its header is cut short or damaged"
        ) from error


class _Cursor:
    """A position in a mapped file, which advances with each value that is read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def header(self) -> Header:
        if self._data[:4] != _MAGIC:
            raise ConfigError(f"{self._path} is not a GGUF file: it begins with {bytes(self._data[:4])!r}")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ConfigError(f"{self._path} must be GGUF of version 2 or 3, little-endian, got {version}")
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        metadata = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        infos = dict(self._tensor_info() for _ in range(num_tensors))
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ConfigError(f"{self._path}: general.alignment must be at least 1, got {alignment!r}")
        size = -(-self._at // alignment) * alignment
        tensors = {
            name: TensorInfo(info.shape, info.ggml_type, size + info.offset) for name, info in infos.items()
        }
        return Header(self._path, metadata, tensors, size)

    def _tensor_info(self) -> tuple[str, TensorInfo]:
        name = self._string()
        num_dimensions = self._scalar("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ConfigError(f"{self._path}: {name} must have at most 4 dimensions, got {num_dimensions}")
        shape = self._many("Q", num_dimensions)[::-1]  # ggml names the fastest dimension first
        return name, TensorInfo(shape, self._scalar("I"), self._scalar("Q"))

    def _value(self, value_type: int) -> Value:
        if value_type == _STRING:
            return self._string()
        if value_type == _ARRAY:
            item_type, length = self._scalar("I"), self._scalar("Q")
            if item_type == _STRING:
                return self._strings(length)
            return list(self._many(self._code(item_type), length))
        return self._many(self._code(value_type), 1)[0]

    def _code(self, value_type: int) -> str:
        code = _SCALARS.get(value_type)
        if code is None:
            raise ConfigError(f"{self._path}: there is no GGUF value of type {value_type}")
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
