"""Other servers, measured in the same sitting: started, awaited, sent the same load by URL, and ended."""

import asyncio
import shutil
import subprocess
from argparse import ArgumentTypeError
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import split
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from loong.core.errors import ClusterError
from loong.runs.spawned_server import last_lines, process_group
from loong.workloads.client.client import Target, run_load
from loong.workloads.client.scrape import Scraper
from loong.workloads.errors import ServerUnusableError
from loong.workloads.metrics.record import RequestRecord
from loong.workloads.request import SMALLEST_VOCABULARY, WorkloadRequest

START_SECONDS = 900.0  # engines load weights, compile and capture
POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Peer:
    """A server with an OpenAI-compatible API at `url`, which has no `/v1`, and the command that starts it."""

    name: str
    url: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunningPeer:
    """A peer that answers, and the model that it serves."""

    url: str
    model: str

    async def serve(self, load: Sequence[WorkloadRequest], seconds: float) -> list[RequestRecord]:
        """Send a load, each request given at most `seconds`, and return the records."""
        target = Target(self.url, self.model, SMALLEST_VOCABULARY, timeout=seconds)
        return await run_load(target, load)


def parse_peer(name: str, url: str, command: str) -> Peer:
    """Check what can be checked before anything is measured.

    Raises:
        ArgumentTypeError: the URL is none, or the command is empty or not to be found.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ArgumentTypeError(f"{url!r} of {name} is not a URL such as http://127.0.0.1:8100")
    try:
        words = tuple(split(command))
    except ValueError as error:
        raise ArgumentTypeError(f"the command of {name} cannot be split into words: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise ArgumentTypeError(f"the command of {name}, {command!r}, begins with no program that is there")
    return Peer(name, url.rstrip("/").removesuffix("/v1"), words)


def check_absent(peers: Sequence[Peer]) -> None:
    """Raise `ArgumentTypeError` if a server answers already where a peer is to be started."""
    for peer in peers:
        try:
            asyncio.run(Scraper(peer.url).served_model(None))
        except ServerUnusableError as error:
            if "no server answers" in str(error):
                continue
        raise ArgumentTypeError(
            f"a server answers at {peer.url} already; end it, or give {peer.name} another port"
        )


@asynccontextmanager
async def running_peer(peer: Peer, folder: Path | None) -> AsyncIterator[RunningPeer]:
    """Start a peer in a process group of its own, wait until it answers, and end the whole group.

    Its output goes to peer-NAME.log in the folder.

    Raises:
        ClusterError: it ended, or did not answer in time; the message has its last lines.
    """
    with TemporaryDirectory() as temporary:
        log = (folder or Path(temporary)) / f"peer-{peer.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with process_group(peer.command, log) as process:
            model = await _answering(peer, process)
            if model is None:
                status = process.poll()
                what = (
                    f"did not answer within {START_SECONDS:g} s" if status is None else f"ended with {status}"
                )
                raise ClusterError(f"{peer.name} {what}; its last lines:\n{last_lines(log)}")
            yield RunningPeer(peer.url, model)


async def _answering(peer: Peer, process: "subprocess.Popen[bytes]") -> str | None:
    """Return the model that the peer serves, once it says so; None if that does not come."""
    deadline = asyncio.get_running_loop().time() + START_SECONDS
    while process.poll() is None and asyncio.get_running_loop().time() < deadline:
        try:
            return (await Scraper(peer.url).served_model(None)).id
        except ServerUnusableError:
            await asyncio.sleep(POLL_SECONDS)
    return None
