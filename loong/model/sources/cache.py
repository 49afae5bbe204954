"""The folder where loong keeps what it downloads or makes once."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `loong` in the user's cache folder; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loong"
