"""Checks where a command is to write, before the work whose result would be lost."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from loong.core.errors import ConfigError
from loong.one_writer import claim
from loong.private_files import make_private_folder


def check_file(flag: str, path: Path) -> None:
    """Raise `ConfigError`, which names the flag, unless the file can be created or replaced."""
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder; name a file")
    _check_folder(flag, path, path.parent)


def make_folder(flag: str, folder: Path) -> None:
    """Make a folder that takes files. Raises `ConfigError`, which names the flag, if that is impossible."""
    try:
        make_private_folder(folder)
    except OSError as error:
        raise ConfigError(f"{flag} {folder} cannot be made: {error.strerror}") from error
    _check_folder(flag, folder, folder)


def _check_folder(flag: str, path: Path, folder: Path) -> None:
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}") from error


@contextmanager
def sole_writer(flag: str, path: Path) -> Iterator[None]:
    """Hold a folder, or a file that is to be replaced, while the context lasts.

    Raises `ConfigError`, which names the flag, if another process has it.
    """
    lock = path if path.is_dir() else path.with_name(f".{path.name}.lock")
    try:
        descriptor = os.open(lock, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}") from error
    try:
        claim(descriptor, f"{flag} {path}")
        try:
            yield
        finally:
            if lock != path:
                lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
