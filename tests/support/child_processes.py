"""The processes that another has started."""

import os
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Those that its threads have started and that are still there, in the order of their ids."""
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return sorted(int(child) for text in lists for child in text.split())


def own_children(word: str) -> list[int]:
    """Those of this process whose command has a word."""
    children = children_of(os.getpid())
    return [pid for pid in children if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
