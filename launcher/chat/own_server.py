"""A server of a chat's own: `loong serve` for as long as the conversation lasts."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from loong.model.sources.source import find_source
from loong.runs.spawned_server import ServerConfig, spawn_server

NUM_INSTANCES = 4
START_TIMEOUT = 600.0  # seconds
_POLICY = "esp"


@contextmanager
def own_server(model: str, extra_arguments: tuple[str, ...] = ()) -> Iterator[str]:
    """Serve a model on CPU instances, with more flags of `loong serve`, and yield the server's URL.

    The model is fetched first, in this process, whose terminal shows the progress. Raises `ConfigError` if
    there is no such model, and `ServerUnusableError`, with the end of the log, if the server does not start.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # for those that fetch it to say so
    source = find_source(model, "auto")
    _say(f"starting {source.name} on {NUM_INSTANCES} CPU instances")
    start = perf_counter()
    config = ServerConfig(model, NUM_INSTANCES, 1, extra_arguments, START_TIMEOUT)
    with (
        TemporaryDirectory(prefix="loong-chat-") as folder,
        spawn_server(config, _POLICY, Path(folder) / "server.log") as url,
    ):
        _say(f"ready after {perf_counter() - start:.0f} s; what it does is shown on {url}/dashboard")
        yield url


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
