"""Models that can be served by a name: built in, and those of the hub that are on this disk."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from loong.core.errors import ConfigError
from loong.hardware.memory import weight_bytes
from loong.model.config import ModelConfig
from loong.model.families.registry import FAMILIES, GGUF_FAMILIES
from loong.model.gguf.quantization import supported_types
from loong.model.shapes import SHAPES, find_config
from loong.model.sources.cache import cache_folder
from loong.model.sources.packaged import PACKAGED, cached_model
from loong.model.sources.source import TINY


class ListedModel(msgspec.Struct, frozen=True):
    """A model with weights. `disk_bytes` is None if it is not on this disk, `fetch_bytes` if it is."""

    name: str
    description: str
    disk_bytes: int | None
    fetch_bytes: int | None
    path: str | None


class ListedShape(msgspec.Struct, frozen=True):
    """Sizes of a well-known model without weights; `num_bytes` is the memory of its weights."""

    name: str
    description: str
    num_bytes: int


class Listing(msgspec.Struct, frozen=True):
    """All that `loong models` lists."""

    built_in: list[ListedModel]
    cached: list[ListedModel]
    shapes: list[ListedShape]
    architectures: list[str]
    gguf_architectures: list[str]
    gguf_types: list[str]


def list_models() -> Listing:
    """Return the models in the caches; models that loong cannot serve are left out."""
    return Listing(
        built_in=[_tiny(), *_packaged()],
        cached=sorted(_of_hub(), key=lambda model: model.name),
        shapes=[
            ListedShape(name, f"{config.architecture}, {config.dtype}", weight_bytes(config))
            for name, config in SHAPES.items()
        ],
        architectures=list(FAMILIES),
        gguf_architectures=list(GGUF_FAMILIES),
        gguf_types=supported_types(),
    )


def _tiny() -> ListedModel:
    return ListedModel(TINY, "a tiny random model, made on first use; the default", None, None, None)


def _packaged() -> Iterator[ListedModel]:
    for model in PACKAGED.values():
        path = cached_model(model, cache_folder())
        yield ListedModel(
            model.name,
            model.description,
            None if path is None else model.file_bytes,
            model.wheel_bytes if path is None else None,
            None if path is None else str(path),
        )


def _of_hub() -> Iterator[ListedModel]:
    from huggingface_hub import scan_cache_dir  # slow to import
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir()
    except CacheNotFound:
        return
    for repository in found.repos:
        if repository.repo_type != "model":
            continue
        for revision in repository.revisions:
            if (config := _servable(revision.snapshot_path)) is not None:
                where = f" at {', '.join(sorted(revision.refs)) or revision.commit_hash}"
                yield ListedModel(
                    repository.repo_id,
                    f"{config.architecture}, {config.dtype}{where}",
                    revision.size_on_disk,
                    None,
                    str(revision.snapshot_path),
                )


def _servable(folder: Path) -> ModelConfig | None:
    """Return the config of a folder that has all that is served, else None."""
    if not (folder / "tokenizer.json").exists() or not any(folder.glob("model*.safetensors")):
        return None
    try:
        return find_config(str(folder))
    except ConfigError:
        return None
