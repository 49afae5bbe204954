"""The processes that another has started."""

import os
from collections.abc import Collection
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Return those that are still there, in the order of their start."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for children in threads for child in children.read_text().split())


def fork_servers_of(pid: int) -> list[int]:
    """Return those of its children that fork others for it."""
    return [child for child in _from_fork_servers(pid) if not _is_forked(child)]


def forked_of(pid: int) -> list[int]:
    """Return the processes that are forked for another."""
    return [child for child in _from_fork_servers(pid) if _is_forked(child)]


def with_descendants(pid: int) -> list[int]:
    """Return a process and all that it and its children have started, and so on."""
    return [pid, *(found for child in children_of(pid) for found in with_descendants(child))]


def own_children(word: str) -> list[int]:
    """Return those of this process whose command has a word."""
    return [pid for pid in children_of(os.getpid()) if word in command_of(pid)]


def own_forked(module: str, besides: Collection[int] = ()) -> list[int]:
    """Return those of this process that run a module."""
    pids = [pid for pid in forked_of(os.getpid()) if pid not in besides]
    return [pid for pid in pids if module in command_of(pid)]


def _from_fork_servers(pid: int) -> list[int]:
    return [child for child in children_of(pid) if "fork_server" in command_of(child)]


def _is_forked(pid: int) -> bool:
    """Return whether a process has the pipe that only those have that were forked."""
    return str(Path(f"/proc/{pid}/fd/0").readlink()).startswith("pipe:")


def command_of(pid: int) -> str:
    """Its arguments, in a row."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
