"""Standard input, output and error, which may be closed or broken."""

import os
import sys

_MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}  # in the order of their descriptors


def open_missing_streams() -> None:
    """Open the null device for each standard stream that is closed, before a socket gets its descriptor."""
    for descriptor, (name, mode) in enumerate(_MODES.items()):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest descriptor that is free, which is this one
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, mode, closefd=False))


def give_up_lost_streams() -> None:
    """Redirect output and error to the null device if they cannot be written.

    Otherwise the flush at exit would fail again.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
