"""A process that does what a request says, for tests of the bounds of such processes."""

import os
import signal
from collections.abc import Callable

from loong.processes.bounded_process import CannotAnswerError, answer_requests

_kept: list[bytearray] = []


def main() -> None:
    """Obey, unless the environment tells the process to refuse, or to end."""
    answer_requests(_prepare)


def _prepare() -> Callable[[bytes], bytes]:
    match os.environ.get("OBEDIENT_PROCESS"):
        case "refuse":
            raise CannotAnswerError("it is told to refuse")
        case "end":
            os._exit(7)
    return _obey


def _obey(request: bytes) -> bytes:
    match request.decode().split():
        case ["end"]:
            os._exit(3)
        case ["wait"]:
            signal.pause()
        case ["keep", num_bytes]:
            _kept.append(bytearray(int(num_bytes)))
    return str(os.getpid()).encode()
