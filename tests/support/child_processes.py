"""The processes that another has started. Those that end while they are looked at count as not there."""

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import warm_commands


def children_of(pid: int) -> list[int]:
    """Return those that are still there, in the order of their start."""
    # A list of children is of a thread, and loses those of one that ends while it is read.
    processes = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return sorted(child for child in processes if _parent_of(child) == pid)


def _parent_of(pid: int) -> int | None:
    with suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None  # it has ended


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
    found = [child for child in children_of(pid) if "fork_server" in command_of(child)]
    return [child for child in found if name_of(child) != warm_commands.NAME]


def _is_forked(pid: int) -> bool:
    """Return whether a process has the pipe that only those have that were forked."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return str(Path(f"/proc/{pid}/fd/0").readlink()).startswith("pipe:")
    return False


def name_of(pid: int) -> str:
    """Return the name that it has given itself; nothing if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def command_of(pid: int) -> str:
    """Return its arguments, in a row; nothing if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    return ""
