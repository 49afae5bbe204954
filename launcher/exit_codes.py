"""The end of a command that the user interrupts."""

import signal

INTERRUPTED = "loong: interrupted"
INTERRUPTED_CODE = 128 + signal.SIGINT
