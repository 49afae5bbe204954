"""The run directory of a server: a private folder for the sockets between its processes.

It is locked as long as its server lives. A server that was killed leaves it behind, and the next start
removes what is certainly such a leftover: a private folder of this user with the marker of a server. The
server was started since this machine was booted, and the lock is free. In it only sockets and the files that
a server makes are removed, and the folder itself only if nothing else is in it.
"""

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir, mkdtemp

from loong.core.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_SOCKET_PATH = 107
_PREFIX = "loong-run-"
_MARKER = "made-by-loong"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FILES = frozenset({"join.lock", _MARKER})  # a server makes these and sockets
_ENDING_OF_METRICS = ".db"  # as prometheus_client names them


class RunDirectory:
    """A folder that this process has made."""

    def __init__(self) -> None:
        """Make it. Raises `ConfigError` if a socket in it would have too long a path."""
        self.path = Path(mkdtemp(prefix=_PREFIX))
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _check_socket_path(self.path)
            if _is_locked(self._descriptor):  # else no later start can know that it is a leftover
                (self.path / _MARKER).write_bytes(_mark())
        except BaseException:
            self.remove()
            raise

    @property
    def trouble(self) -> str:
        """Return the reason why no process can start in it any more, an empty string if there is none."""
        if _is_same(self.path, self._descriptor):
            return ""
        return f"the run directory {self.path} is gone, so no process of this server can start again"

    def remove(self) -> None:
        """Remove what a server made in it, and itself unless something else is in it."""
        _remove(self.path, self._descriptor)
        os.close(self._descriptor)


@contextmanager
def run_directory() -> Iterator[RunDirectory]:
    """Return a run directory that lasts as long as the context, after removing those of killed servers."""
    _remove_leftovers()
    directory = RunDirectory()
    try:
        yield directory
    finally:
        directory.remove()


def _remove_leftovers() -> None:
    """Remove the run directories of servers that were killed before they could do so."""
    for path in Path(gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # not ours, or no directory
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if _is_leftover(descriptor):
                    logger.info("removing %s, left by a server that was killed", path)
                    _remove(path, descriptor)
            finally:
                os.close(descriptor)


def _is_leftover(descriptor: int) -> bool:
    """Return whether a folder is the run directory of a server of this user and boot that has ended."""
    status = os.fstat(descriptor)
    is_private = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == stat.S_IRWXU
    return is_private and _marker(descriptor) == _mark() and _is_locked(descriptor)


def _marker(directory: int) -> bytes:
    descriptor = os.open(_MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    try:
        return os.read(descriptor, len(_mark()) + 1)
    finally:
        os.close(descriptor)


def _mark() -> bytes:
    return b"a run directory of loong, boot " + _BOOT_ID.read_bytes()


def _is_locked(descriptor: int) -> bool:
    """Lock a folder for as long as the descriptor is open. Return whether nobody else has locked it.

    `systemd-tmpfiles` leaves a folder that is locked so.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody has, or the file system cannot
        return False
    return True


def _remove(path: Path, descriptor: int) -> None:
    with os.scandir(descriptor) as entries:
        for entry in list(entries):
            if _is_made_by_a_server(entry):
                with suppress(FileNotFoundError):
                    os.unlink(entry.name, dir_fd=descriptor)
            else:
                logger.warning("%s stays, because of %s in it, which no server has made", path, entry.name)
    if _is_same(path, descriptor):
        with suppress(OSError):  # it is not empty
            path.rmdir()


def _is_made_by_a_server(entry: "os.DirEntry[str]") -> bool:
    with suppress(FileNotFoundError):
        mode = entry.stat(follow_symlinks=False).st_mode
        is_file = stat.S_ISREG(mode) and (entry.name in _FILES or entry.name.endswith(_ENDING_OF_METRICS))
        return stat.S_ISSOCK(mode) or is_file
    return True  # it is gone


def _is_same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except OSError:
        return False


def _check_socket_path(directory: Path) -> None:
    """Raise `ConfigError` if the longest socket path in this directory exceeds the system's limit."""
    longest = len(os.fsencode(directory / "worker-0000-00-000"))
    if longest > MAX_SOCKET_PATH:
        raise ConfigError(
            f"sockets in {directory} would have paths of {longest} bytes, but {MAX_SOCKET_PATH} are "
            "the most; set TMPDIR to a shorter one"
        )
