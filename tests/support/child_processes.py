"""The processes that another has started."""

import os
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Those that its main thread has started and that are still there."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def own_children(word: str) -> list[int]:
    """Those of this process whose command has a word."""
    children = children_of(os.getpid())
    return [pid for pid in children if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
