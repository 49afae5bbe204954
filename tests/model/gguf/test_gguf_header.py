"""Headers of GGUF files, whole and damaged."""

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import finish

from loong.core.errors import ConfigError
from loong.model.gguf.header import read_header
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
    with pytest.raises(ConfigError, match="yes must be an integer, got 'True'"):
        metadata.size("yes")
    with pytest.raises(ConfigError, match="words must be a string"):
        metadata.required("words", str)
    with pytest.raises(ConfigError, match="words must be an integer, got 'é'"):
        metadata.items("words", int)
    with pytest.raises(ConfigError, match="pi must be an array"):
        metadata.items("pi", float)
    with pytest.raises(ConfigError, match="lacks nothing, which must be a string"):
        metadata.required("nothing", str)
