"""The start of a child process of the engine's process: its config, and the signals that it ignores.

A supervisor may signal all processes of a service at once. The engine's process then drains, and needs its
children for that, so they ignore these signals. A child ends when its standard input is closed, or when the
engine's process dies.
"""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TypeVar

import msgspec

Config = TypeVar("Config")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_IGNORED = (*STOP_SIGNALS, signal.SIGUSR2)


def config_line(config: object) -> bytes:
    """Return a config as the first line of a child's standard input. Paths may contain any bytes."""
    return json.dumps(msgspec.to_builtins(config, enc_hook=_text_of)).encode() + b"\n"


def config_of(line: bytes, kind: type[Config]) -> Config:
    """Return the config of type `kind` in a line."""
    return msgspec.convert(json.loads(line), kind, dec_hook=_path_of)


def _text_of(path: object) -> str:
    if isinstance(path, Path):
        return str(path)
    raise NotImplementedError(f"a config cannot have {path!r}")


def _path_of(kind: type[object], text: object) -> Path:
    if kind is Path and isinstance(text, str):
        return Path(text)
    raise NotImplementedError(f"a config cannot have {kind}")


def end_with_parent(stdin: FileIO) -> None:
    """End this process, by a thread, when standard input closes, which the death of the parent does."""
    threading.Thread(target=_wait_and_end, args=(stdin,), daemon=True).start()


def _wait_and_end(stdin: FileIO) -> None:
    with suppress(OSError):
        while stdin.read(1):
            pass
    os._exit(1)


def name_process(name: str) -> None:
    """Give this process a name of at most 15 bytes, for `top`, `pgrep` and the kernel's log."""
    Path("/proc/self/comm").write_text(name)


@contextmanager
def signals_held() -> Iterator[None]:
    """Block signals for processes that this thread starts meanwhile, until they call
    `leave_signals_to_parent`.

    A process inherits the blocked signals, so no signal ends it before its program begins. Signals to this
    thread wait.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, (*_IGNORED, signal.SIGUSR1))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def leave_signals_to_parent() -> None:
    """Ignore the signals that would end this process, and discard those that came since it was started.

    SIGUSR1 stays blocked for `loong.processes.stacks.stacks_on_request`.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
