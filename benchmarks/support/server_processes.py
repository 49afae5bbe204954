"""The processes of a server on this machine, what they use, and the KV that they hold."""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """The resources of a process, by its name: `loong-worker-3` is the worker of instance 3."""

    pid: int
    name: str
    command: str
    memory_mib: float
    num_descriptors: int
    num_threads: int


def child_pid() -> int:
    """Return the server's process id: it is the only child."""
    own = Path("/proc/self").resolve().name
    return int(Path(f"/proc/{own}/task/{own}/children").read_text().split()[-1])


def processes_of(pid: int) -> list[ProcessUse]:
    """Return a process and all below it, without those that end meanwhile."""
    try:
        folder = Path(f"/proc/{pid}")
        children = (folder / "task" / str(pid) / "children").read_text().split()
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        name = (folder / "comm").read_text().strip()
        status = (folder / "status").read_text()
        resident, threads = (
            int(found[0]) if (found := re.findall(rf"{name}:\s+(\d+)", status)) else 0
            for name in ("VmRSS", "Threads")
        )
        own = ProcessUse(pid, name, command, resident / 1024, len([*(folder / "fd").iterdir()]), threads)
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [own, *(use for child in children for use in processes_of(int(child)))]


def metric(url: str, name: str) -> float:
    """Return the sum of a metric of a server over its labels."""
    with urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))


def kv_tokens(url: str) -> float:
    """Return the tokens of KV that a server holds."""
    return metric(url, "loong:instance_kv_tokens")
