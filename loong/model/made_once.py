"""Folders that are made at the first use and then kept."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from loong.core.errors import ConfigError


def made_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return `folder`. If it does not exist, `fill` fills it. Raises ConfigError if it cannot be written.

    Any number of processes may call this at once: the folder appears complete or not at all.
    """
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            fill(draft)
            draft.chmod(0o755)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        if not folder.exists():  # else another process has made it
            raise ConfigError(f"cannot write {folder}: {error.strerror}") from error
    return folder
