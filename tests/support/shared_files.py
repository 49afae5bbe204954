"""Files that other users of this host could read."""

from pathlib import Path


def shared_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder, and below it, that are not for their user alone."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path.name for path in paths if path.stat().st_mode & 0o077)
