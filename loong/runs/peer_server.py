"""The server of another engine for the time of its measurements: started by a command, awaited, and ended."""

import contextlib
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import split
from urllib.parse import urlsplit

from loong.core.errors import ConfigError
from loong.runs.shown_command import shown_command
from loong.runs.spawned_server import is_healthy_in_time, process_group, start_failure
from loong.workloads.client.backends import ServerApi

CONNECT_SECONDS = 1.0
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class PeerServer:
    """A server that `command` starts so that it answers at `base_url`, which has no `/v1`.

    `start_timeout` is in seconds, until it is healthy. `num_gpus` is None if it is unknown.
    """

    base_url: str
    command: tuple[str, ...]
    start_timeout: float
    backend: ServerApi = ServerApi.OPENAI
    num_gpus: int | None = None

    @classmethod
    def parsed(cls, name: str, url: str, command: str, start_timeout: float) -> "PeerServer":
        """Return the peer that words of a command line name.

        Raises:
            ConfigError: the command cannot be split into words, or see `check_peer`.
        """
        try:
            words = tuple(split(command))
        except ValueError as error:
            raise ConfigError(f"--peer {name}: {command!r} cannot be split into words: {error}") from error
        peer = cls(url.rstrip("/").removesuffix("/v1"), words, start_timeout)
        check_peer(name, peer)
        return peer


def check_peer(name: str, peer: PeerServer) -> None:
    """Check what can be checked before anything is measured.

    Raises:
        ConfigError: the URL is none, the program does not exist, or the port is in use.
    """
    parts = urlsplit(peer.base_url)
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
        raise ConfigError(f"--peer {name}: {peer.base_url!r} is not a URL such as http://127.0.0.1:8100")
    if not peer.command or shutil.which(peer.command[0]) is None:
        program = peer.command[0] if peer.command else ""
        raise ConfigError(f"--peer {name}: the program {program!r} does not exist; give its path")
    if _is_taken(peer.base_url):
        raise ConfigError(
            f"--peer {name}: the port of {peer.base_url} is in use; end that server, or give another port"
        )


@contextlib.contextmanager
def spawn_peer(name: str, peer: PeerServer, log_path: Path) -> Iterator[None]:
    """Start a peer in a process group of its own, wait until it is healthy, and end the whole group.

    Raises:
        ConfigError: see `check_peer`.
        ServerUnusableError: it ended or was not healthy in time; the message has the last lines of its log.
    """
    check_peer(name, peer)
    with process_group(peer.command, log_path) as process:
        if not is_healthy_in_time(process, peer.base_url, peer.start_timeout):
            command = shown_command(peer.command)
            raise start_failure(command, process.poll(), peer.start_timeout, log_path)
        yield


def _is_taken(base_url: str) -> bool:
    """Return whether a server listens at the URL's port."""
    parts = urlsplit(base_url)
    address = (parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme])
    try:
        with socket.create_connection(address, CONNECT_SECONDS):
            return True
    except OSError:
        return False
