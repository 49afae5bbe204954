"""An API process: answers clients on a socket that it shares with others, for an engine in its parent."""

import gc
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry

from loong.engine.client import EngineLimits
from loong.launcher.serve.front import LAST_WORDS_SECONDS
from loong.processes.child import config_of, leave_signals_to_parent, name_process
from loong.processes.logs import log_to_stderr
from loong.processes.stacks import stacks_on_request
from loong.server.api.listen import allow_many_connections, serve, stop_listening
from loong.server.app import create_remote_app
from loong.server.context import SERVER
from loong.server.remote.client import RemoteEngineClient
from loong.server.remote.forwarding import RemoteCluster
from loong.server.settings import ServerSettings
from loong.server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ApiProcessConfig:
    """The configuration of an API process."""

    settings: ServerSettings
    limits: EngineLimits
    tokenizer_folder: str
    eos_token_ids: tuple[int, ...]
    cluster: RemoteCluster
    log_format: str


def main() -> None:
    """Answer until the engine's process closes the channel; arguments: descriptors of listener and channel.

    Signals that end a service are handled by the engine's process.
    """
    leave_signals_to_parent()
    name_process("loong-api")
    config = config_of(sys.stdin.buffer.readline(), ApiProcessConfig)
    log_to_stderr(config.log_format)
    listener, channel = (socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:])
    with stacks_on_request("an API process"):
        uvloop.run(_answer(config, listener, channel))


async def _answer(config: ApiProcessConfig, listener: socket.socket, channel: socket.socket) -> None:
    client = RemoteEngineClient(config.limits)
    await client.open(channel)
    tokenizer = Tokenizer.from_folder(Path(config.tokenizer_folder), config.eos_token_ids)
    tokenizer.make_ahead()
    allow_many_connections()
    app = create_remote_app(client, tokenizer, config.settings, CollectorRegistry(), config.cluster)
    runner = await serve(app, listener, shutdown_timeout=LAST_WORDS_SECONDS)
    gc.freeze()  # as in the engine's process
    client.report_listening()
    app[SERVER].grammars.start_ahead()
    try:
        await client.stop_listening.wait()
        await stop_listening(runner)
        await client.ended.wait()
    finally:
        await runner.cleanup()
