"""From the user's name of a model to its files."""

from pathlib import Path

import pytest
from families import write_tiny_model
from gguf_files import write_gguf

from loong.core.errors import ConfigError
from loong.launcher.cli import build_parser
from loong.launcher.cluster_flags import ChosenCluster, chosen_cluster
from loong.model.sources.source import find_source


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def chosen(*words: str) -> ChosenCluster:
    """Return the cluster that the flags of `loong serve` give."""
    return chosen_cluster(build_parser(["serve"])[0].parse_args(["serve", *words]), 60.0)


@pytest.mark.parametrize("words", [(), ("loong-tiny",), ("--model", "loong-tiny")])
def test_the_tiny_model_is_the_default_and_has_a_name(words: tuple[str, ...]) -> None:
    cluster = chosen(*words)
    assert cluster.name == "loong-tiny"
    assert cluster.cluster.model == str(cluster.tokenizer_folder)


def test_a_folder_goes_by_its_name(tmp_path: Path) -> None:
    folder = write_tiny_model("llama", tmp_path / "my-llama")
    source = find_source(str(folder), "auto")
    assert (source.name, source.model, source.tokenizer_folder) == ("my-llama", str(folder), folder)
    assert not source.is_gguf


def test_a_gguf_file_goes_by_its_name_and_is_computed_in_float32(tmp_path: Path) -> None:
    path, _ = write_gguf("llama", tmp_path, "Q4_1")
    cluster = chosen(str(path))
    assert (cluster.name, cluster.cluster.model) == ("llama-Q4_1", str(path))
    assert (cluster.tokenizer_folder / "tokenizer.json").is_file()
    assert cluster.model.dtype == "float32"
    assert chosen(str(path), "--dtype", "float16").model.dtype == "float16"
    assert chosen(str(path), "--load-format", "dummy").model.num_layers == 2


def test_a_shape_has_the_tiny_tokenizer(tmp_path: Path) -> None:
    source = find_source("llama-3.1-8b", "dummy")
    assert (source.name, source.model) == ("llama-3.1-8b", "llama-3.1-8b")
    assert (source.tokenizer_folder / "tokenizer.json").is_file()


def test_what_does_not_exist_is_refused_with_what_may_be_meant() -> None:
    with pytest.raises(ConfigError, match=r"'smolm2-135m' does not exist; .* did you mean smollm2-135m\?"):
        find_source("smolm2-135m", "auto")
    with pytest.raises(ConfigError, match=r"'\./no/such/folder' does not exist; name a folder, a GGUF file"):
        find_source("./no/such/folder", "auto")
    with pytest.raises(ConfigError, match=r"llama-3\.1-8b is a built-in shape without weights"):
        find_source("llama-3.1-8b", "auto")


def test_other_files_and_revisions_of_what_has_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_text("PK and so on")
    with pytest.raises(ConfigError, match=r"a\.bin is not a GGUF file"):
        find_source(str(tmp_path / "a.bin"), "auto")
    with pytest.raises(ConfigError, match="--revision main is for models of the hub"):
        chosen(str(tmp_path), "--revision", "main")
    with pytest.raises(ConfigError, match="--revision main is for models of the hub"):
        chosen("smollm2-135m", "--revision", "main")
