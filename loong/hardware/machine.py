"""Facts about the machine and the commit, reported with every number."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

from loong.hardware.driver import MIB, driver_gpus, driver_version

COMMAND_SECONDS = 10.0


def machine_facts() -> dict[str, str]:
    """Return what a reader needs to judge a number: processor, cores, memory, GPUs, versions, commit."""
    facts = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "processor": _processor(),
        "num_cores": str(num_processors()),
        "load_average": "{:.2f}, {:.2f}, {:.2f} over 1, 5, 15 minutes".format(*os.getloadavg()),
        "memory_gib": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f}",
    }
    if gpus := driver_gpus():
        version = driver_version()
        facts["gpus"] = "\n".join(f"{gpu.name}, {gpu.total_bytes // MIB} MiB, {version}" for gpu in gpus)
    commit = git_commit()
    if commit is not None:
        facts["git_commit"] = commit
    return facts


def num_processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def git_commit() -> str | None:
    """Return the commit this code is at, with `+` if the tree differs from it; None outside a checkout."""
    folder = str(Path(__file__).resolve().parent)
    commit = output_of("git", "-C", folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return commit + ("+" if output_of("git", "-C", folder, "status", "--porcelain", "-uno") else "")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def output_of(program: str, *arguments: str) -> str:
    """Return what a program prints, nothing if it is not there or fails."""
    path = shutil.which(program)
    if path is None:
        return ""
    try:
        finished = subprocess.run(  # noqa: S603  a command of our own making
            [path, *arguments], capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return ""
    return finished.stdout.strip()
