"""Headers of GGUF files, whole and damaged."""

import re
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import finish
from raw_gguf import ARRAY, BOOL, I32, STRING, U8, U64, tensor, text, value, write_raw

from loong.core.errors import ConfigError
from loong.model.gguf.header import MAX_BYTES, MAX_ITEMS, MAX_NAME_LETTERS, MAX_NAMES, read_header
from loong.model.gguf.metadata import Metadata


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_bool("yes", True)
    writer.add_float64("pi", 3.25)
    writer.add_array("words", ["é", "", "three"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.arange(4, dtype=np.float16))
    finish(writer)
    return path


def test_a_header_has_all_values_and_where_tensors_are(path: Path) -> None:
    header = read_header(path)
    values = {key: header.values[key] for key in ("yes", "pi", "words", "numbers", "llama.context_length")}
    assert values == {
        "yes": True,
        "pi": 3.25,
        "words": ["é", "", "three"],
        "numbers": [1, 2, 3],
        "llama.context_length": 64,
    }
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert {name: info.offset for name, info in header.tensors.items()} == {
        name: tensor.data_offset for name, tensor in theirs.items()
    }
    assert header.tensors["a"].shape == (2, 3)
    assert header.tensors["b"].shape == (4,)


def test_a_file_that_ends_in_its_header_is_refused_wherever_it_ends(path: Path) -> None:
    whole, size = path.read_bytes(), read_header(path).size
    for length in range(0, size - 32, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"not a (complete )?GGUF file"):
            read_header(path)


def test_damage_is_an_error_that_names_the_file(path: Path) -> None:
    whole = path.read_bytes()
    for at in range(4, read_header(path).size):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            read_header(path)
        except ConfigError as error:
            assert str(path) in str(error)  # noqa: PT017  most damage is not seen, and then none is raised


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (b"PK\x03\x04", " is not a GGUF file: it begins with"),
        (b"GGUF\x01\0\0\0", " must be GGUF of version 2 or 3"),
    ],
)
def test_other_files_are_refused(start: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(start + bytes(64))
    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}{said}"):
        read_header(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_header(tmp_path / "b.gguf")


def test_values_of_the_wrong_type_are_named(path: Path) -> None:
    metadata = Metadata(read_header(path))
    with pytest.raises(ConfigError, match="yes must be an integer, got True"):
        metadata.size("yes")
    with pytest.raises(ConfigError, match="words must be a string"):
        metadata.required("words", str)
    with pytest.raises(ConfigError, match="words must be an integer, got 'é'"):
        metadata.items("words", int)
    with pytest.raises(ConfigError, match="pi must be an array"):
        metadata.items("pi", float)
    with pytest.raises(ConfigError, match="lacks nothing, which must be a string"):
        metadata.required("nothing", str)


def array(item_type: int, length: int, items: bytes = b"") -> bytes:
    return value("x", ARRAY, struct.pack("<IQ", item_type, length) + items)


def alignment(value_type: int, encoded: bytes) -> bytes:
    return value("general.alignment", value_type, encoded)


HOSTILE: list[tuple[Callable[[Path], Path], str]] = [
    (
        lambda p: write_raw(p, [alignment(U64, struct.pack("<Q", 2**40))]),
        "power of two .*, got 1099511627776",
    ),
    (lambda p: write_raw(p, [alignment(U64, struct.pack("<Q", 48))]), "power of two .*, got 48"),
    (lambda p: write_raw(p, [alignment(I32, struct.pack("<i", -32))]), "power of two .*, got -32"),
    (lambda p: write_raw(p, [alignment(U64, bytes(8))]), "power of two .*, got 0"),
    (lambda p: write_raw(p, [alignment(BOOL, b"\1")]), "power of two .*, got True"),
    (lambda p: write_raw(p, [alignment(STRING, text("32"))]), "power of two .*, got '32'"),
    (lambda p: write_raw(p, num_values=2**63), f"at most {MAX_NAMES:,} values, got 9,223,372"),
    (lambda p: write_raw(p, num_tensors=2**63), f"at most {MAX_NAMES:,} tensors, got 9,223,372"),
    (lambda p: write_raw(p, num_values=3, num_data_bytes=0), "header is cut short, damaged, or longer than"),
    (lambda p: write_raw(p, [array(U8, 2**33)]), f"at most {MAX_ITEMS:,} items in arrays, but x ends at"),
    (lambda p: write_raw(p, [array(U64, 2**63)]), f"at most {MAX_ITEMS:,} items in arrays, but x ends at"),
    (lambda p: write_raw(p, [array(STRING, 2**40)]), f"at most {MAX_ITEMS:,} items in arrays, but x ends at"),
    (lambda p: write_raw(p, [array(U8, 2**21)]), "header is cut short, damaged, or longer than"),
    (lambda p: write_raw(p, [array(ARRAY, 1, struct.pack("<IQ", ARRAY, 1) * 9999)]), "item of x has type 9"),
    (lambda p: write_raw(p, [value("x", 13, b"")]), "x has type 13, which is not supported"),
    (lambda p: write_raw(p, [value("x", STRING, struct.pack("<Q", 2**63))]), "header is cut short"),
    (lambda p: write_raw(p, [value("x", BOOL, b"\1")] * 2), "has 'x' twice"),
    (lambda p: write_raw(p, [], [tensor("a", [2])] * 2), "has 'a' twice"),
    (lambda p: write_raw(p, [value("x" * 999, BOOL, b"\1")]), f"999 letters, and {MAX_NAME_LETTERS} are the"),
    (lambda p: write_raw(p, [], [tensor("a", [])]), "a must have 1 to 4 dimensions, got 0"),
    (lambda p: write_raw(p, [], [tensor("a", [1] * 5)]), "a must have 1 to 4 dimensions, got 5"),
    (lambda p: write_raw(p, [], [tensor("a", [4, 0])]), r"cannot hold a of shape \[0, 4\] at 0"),
    (lambda p: write_raw(p, [], [tensor("a", [2**63, 2**63])]), "cannot hold a of shape .* at 0"),
    (lambda p: write_raw(p, [], [tensor("a", [2**40])]), r"cannot hold a of shape \[1099511627776\] at 0"),
    (lambda p: write_raw(p, [], [tensor("a", [2], 2**63)]), r"cannot hold a of shape \[2\] at 9223372"),
]


@pytest.mark.parametrize(("write", "said"), HOSTILE)
def test_what_no_file_can_have_is_refused_before_memory_is_taken_for_it(
    write: Callable[[Path], Path], said: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}.*{said}"):
        read_header(path)


def test_a_header_is_bounded_however_large_its_file_is(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.gguf", [value("x", STRING, struct.pack("<Q", MAX_BYTES))])
    with path.open("ab") as file:
        file.truncate(2**40)  # of holes
    with pytest.raises(ConfigError, match=f"longer than {MAX_BYTES:,} bytes"):
        read_header(path)
