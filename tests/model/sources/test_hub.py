"""Models of a small hub on the loopback."""

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree

import pytest
from families import write_tiny_model
from huggingface_hub import close_session, constants
from small_hub import COMMIT, SmallHub, small_hub

from loong.core.errors import ConfigError
from loong.launcher.cli import main
from loong.model.sources.hub import fetch_from_hub, is_hub_name
from loong.model.sources.source import find_source
from loong.model.tiny import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model's folder with more in it than is served."""
    folder = tmp_path_factory.mktemp("hub") / "Model"
    copytree(tiny_model(folder.parent), folder)
    for name in ("README.md", "pytorch_model.bin", "consolidated.safetensors"):
        (folder / name).write_text("not for loong")
    for name in ("special_tokens_map.json", "added_tokens.json"):
        (folder / name).write_text("{}")
    for name in ("additional_chat_templates", "onnx"):
        (folder / name).mkdir()
        (folder / name / "tool_use.jinja").write_text("{{ tools }}")
    return folder


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    (strange / "model.safetensors").write_text("never asked for")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "a.gguf").write_text("GGUF")
    weightless = write_tiny_model("llama", tmp_path / "weightless")
    (weightless / "model.safetensors").rename(weightless / "pytorch_model.bin")
    folders = {"org/model": model, "org/gated": model, "org/strange": strange, "org/bare-GGUF": bare}
    served = SmallHub({**folders, "org/weightless": weightless}, frozenset({"org/gated"}))
    with small_hub(served) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)  # as HF_ENDPOINT does at the start
        template = f"{running.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield running
        close_session()


def reported(name: str, revision: str | None = None) -> str:
    """Return the error of a model that cannot be fetched."""
    with pytest.raises(ConfigError) as caught:
        fetch_from_hub(name, revision, has_weights=True)
    return str(caught.value)


def test_what_is_served_is_fetched_once_and_nothing_else(hub: SmallHub, model: Path) -> None:
    source = find_source("org/model", "auto")
    folder = Path(source.model)
    assert source.name == "org/model"
    assert source.tokenizer_folder == folder
    assert folder.name == COMMIT
    small = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    small |= {"special_tokens_map.json", "added_tokens.json"}
    others = {"additional_chat_templates", "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == {*small, *others}
    assert (folder / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert (folder / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    num_asked = len(hub.asked)
    assert find_source("org/model", "auto", "main") == source
    assert [path for path in hub.asked[num_asked:] if "/resolve/" in path] == []


def test_dummy_weights_are_not_fetched(hub: SmallHub) -> None:
    source = find_source("org/model", "dummy")
    assert not (Path(source.model) / "model.safetensors").exists()


def test_a_download_that_breaks_off_goes_on_where_it_stopped(
    hub: SmallHub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)  # of which only whole ones are kept
    hub.broken_off.add("model.safetensors")
    folder = fetch_from_hub("org/model", None, has_weights=True)
    size = (model / "model.safetensors").stat().st_size
    assert hub.ranges == [f"bytes={size // 2 // 4096 * 4096}-"]
    assert (folder / "model.safetensors").stat().st_size == size


def test_gated_models_want_a_token(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"org/gated is gated: ask for access at {hub.url}/org/gated, and set HF_TOKEN" in reported(
        "org/gated"
    )
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert (fetch_from_hub("org/gated", None, has_weights=True) / "model.safetensors").exists()


def test_missing_models_and_revisions_are_named(hub: SmallHub) -> None:
    assert f"no folder org/modle here and no such model on the hub ({hub.url})" in reported("org/modle")
    assert reported("org/model", "v9") == "org/model of the hub has no revision v9"


def test_what_cannot_be_served_is_refused_before_its_weights_come(hub: SmallHub) -> None:
    assert "architectures must start with one of Llama" in reported("org/strange")
    assert not any("safetensors" in path for path in hub.asked)
    assert "org/bare-GGUF of the hub has no config.json; to serve one of its GGUF files" in reported(
        "org/bare-GGUF"
    )
    assert "org/weightless of the hub has no model.safetensors" in reported("org/weightless")


def test_without_a_hub_what_is_here_is_served(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch_from_hub("org/model", None, has_weights=True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where no server answers
    assert fetch_from_hub("org/model", None, has_weights=True) == folder
    assert "org/gated is not wholly on this disk, and the hub (http://127.0.0.1:9) cannot be" in reported(
        "org/gated"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_from_hub("org/model", None, has_weights=True) == folder
    assert "org/gated is not wholly on this disk, and HF_HUB_OFFLINE is set" in reported("org/gated")


def test_the_models_that_are_here_are_listed(
    hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["cached"] == []
    assert [model["name"] for model in listed["built_in"]] == ["loong-tiny", "smollm2-135m"]
    assert listed["built_in"][1]["disk_bytes"] is None
    assert "Q4_1" in listed["gguf_types"]
    folder = fetch_from_hub("org/model", None, has_weights=True)
    assert main(["models", "--json"]) == 0
    (cached,) = json.loads(capsys.readouterr().out)["cached"]
    assert (cached["name"], cached["path"]) == ("org/model", str(folder))
    assert cached["description"] == "LlamaForCausalLM, float32 at main"
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert "org/model" in shown
    assert "93 MB to fetch" in shown


@pytest.mark.parametrize(
    ("name", "is_one"), [("org/Model-1.5B", True), ("./model", False), ("a/b/c", False), ("model", False)]
)
def test_names_of_the_hub_have_two_parts(name: str, is_one: bool) -> None:
    assert is_hub_name(name) == is_one
