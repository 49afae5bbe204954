"""GGUF files byte by byte, as no writer makes them."""

import struct
from collections.abc import Sequence
from pathlib import Path

U8, I32, BOOL, STRING, ARRAY, U64 = 0, 5, 7, 8, 9, 10  # types of values


def text(value: str) -> bytes:
    """Return a string with its length before it."""
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def value(key: str, value_type: int, encoded: bytes) -> bytes:
    """Return a value of the metadata, encoded, under its key."""
    return text(key) + struct.pack("<I", value_type) + encoded


def tensor(name: str, dimensions: Sequence[int], offset: int = 0) -> bytes:
    """Return the entry of a tensor of float32 in a header."""
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + sizes + struct.pack("<IQ", 0, offset)


def write_raw(
    path: Path,
    values: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    num_values: int | None = None,
    num_tensors: int | None = None,
    num_data_bytes: int = 64,
) -> Path:
    """Write a header with these parts, or another number of them than there are, and zeros after it."""
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(values) if num_values is None else num_values,
    )
    header = b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join((*values, *tensors))
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(num_data_bytes))
    return path
