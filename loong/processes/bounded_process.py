"""A process that answers requests with bounded memory. `loong.server.bounded_processes` starts it.

A message is 8 bytes with the length of its content, and the content. Requests come on standard input, and
none is empty. Answers leave on standard output. The first one belongs to no request: it is empty once the
process is ready, or says why the process can answer nothing.
"""

import os
import resource
import signal
import sys
from collections.abc import Callable
from io import FileIO
from pathlib import Path

NUM_LENGTH_BYTES = 8
_MAX_EXTRA_MEMORY = 2**29  # bytes, besides those of a process that is ready
_START_SECONDS = 60
_MAX_SECONDS = 10  # for one request, if the parent has gone: it waits less


class CannotAnswerError(Exception):
    """The process can answer no request, for the reason in the message."""


def answer_requests(prepare: Callable[[], Callable[[bytes], bytes]]) -> None:
    """Answer requests by the function that `prepare` returns, until standard input ends.

    End also if the process has grown much, because memory that is in pieces would fail later requests.
    """
    requests = sys.stdin.buffer
    with (
        os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers,
        Path("/proc/self/statm").open("rb", 0) as sizes,
    ):
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # other output of this process is not an answer

        def answer(content: bytes) -> None:
            answers.write(message(content))
            answers.flush()

        signal.alarm(_START_SECONDS)
        try:
            answer_to = prepare()
        except CannotAnswerError as error:
            answer(str(error).encode())
            return
        at_start = _num_bytes(sizes)
        resource.setrlimit(resource.RLIMIT_AS, (at_start + _MAX_EXTRA_MEMORY,) * 2)
        answer(b"")
        while _num_bytes(sizes) < at_start + _MAX_EXTRA_MEMORY // 2:
            signal.alarm(0)
            length = int.from_bytes(requests.read(NUM_LENGTH_BYTES))
            if len(content := requests.read(length)) < length or not content:  # the parent has gone
                return
            signal.alarm(_MAX_SECONDS)
            answer(answer_to(content))
            del content  # it may be large


def message(content: bytes) -> bytes:
    """Return the bytes of a message."""
    return len(content).to_bytes(NUM_LENGTH_BYTES) + content


def _num_bytes(sizes: FileIO) -> int:
    """Return the size of the address space of this process."""
    return int(os.pread(sizes.fileno(), 64, 0).split()[0]) * resource.getpagesize()
