"""The start of a process that the engine's process starts: its config, and the signals that it ignores.

A supervisor may signal all processes of a service at once. The engine's process then drains, for which it
needs the others, so they ignore what would end them. They end when it closes their standard input, or dies.
"""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

Config = TypeVar("Config")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_IGNORED = (*STOP_SIGNALS, signal.SIGUSR2)


def config_line(config: object) -> bytes:
    """Return a config as the first line of a child's standard input; paths in it may be of any bytes."""
    return json.dumps(msgspec.to_builtins(config)).encode() + b"\n"


def config_of(line: bytes, kind: type[Config]) -> Config:
    """Return the config of this type that is in a line."""
    return msgspec.convert(json.loads(line), kind)


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold signals back from processes that this thread starts meanwhile, until `leave_signals_to_parent`.

    A process inherits this, so no signal ends it before its program begins. In this thread signals wait.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, (*_IGNORED, signal.SIGUSR1))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def leave_signals_to_parent() -> None:
    """Ignore what would end this process, those signals included that have come since it was started.

    SIGUSR1 is held for `loong.stacks.stacks_on_request`, if that is ever entered.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
