"""Files and folders that one process at a time may write."""

import errno
import fcntl

from loong.core.errors import ConfigError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems that know none


def claim(descriptor: int, name: str) -> None:
    """Take an open file or folder for this process, until it is closed or the process ends.

    Raises `ConfigError` if another process has it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{name} is being written by another process; name another one") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
