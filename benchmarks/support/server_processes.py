"""The processes of a server on this machine, what they use, and the KV that they hold."""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """The resources of a process. The server has depth 0, its fork servers 1, and workers 2."""

    command: str
    depth: int
    memory_mib: float
    num_descriptors: int
    num_threads: int


def child_pid() -> int:
    """Return the server's process id: it is the only child."""
    own = Path("/proc/self").resolve().name
    return int(Path(f"/proc/{own}/task/{own}/children").read_text().split()[-1])


def processes_of(pid: int, depth: int = 0) -> list[ProcessUse]:
    """Return a process and all below it, without those that end meanwhile."""
    try:
        folder = Path(f"/proc/{pid}")
        children = (folder / "task" / str(pid) / "children").read_text().split()
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        status = (folder / "status").read_text()
        resident, threads = (
            int(found[0]) if (found := re.findall(rf"{name}:\s+(\d+)", status)) else 0
            for name in ("VmRSS", "Threads")
        )
        own = ProcessUse(command, depth, resident / 1024, len([*(folder / "fd").iterdir()]), threads)
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [own, *(use for child in children for use in processes_of(int(child), depth + 1))]


def metric(url: str, name: str) -> float:
    """Return the sum of a metric of a server over its labels."""
    with urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))


def kv_tokens(url: str) -> float:
    """Return the tokens of KV that a server holds."""
    return metric(url, "loong:instance_kv_tokens")
