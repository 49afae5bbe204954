"""Files that no other user of the host may read: they have prompts or outputs, or say who asked when.

A file or folder that exists keeps its mode.
"""

import os
from pathlib import Path


def private(path: str, flags: int) -> int:
    """Open a file, as the `opener` of `open`; if it is new, only this user can read and write it."""
    return os.open(path, flags, 0o600)


def write_private(path: Path, data: bytes | str) -> None:
    """Write a whole file."""
    with open(path, "wb", opener=private) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def make_private_folder(folder: Path) -> None:
    """Make a folder, unless it exists. Others cannot see what is in it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
