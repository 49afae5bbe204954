"""Peers as `--peer` names them: a name, a URL and a command, or a template for vLLM."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from loong.core.errors import ConfigError
from loong.model.sources.hub import is_hub_name
from loong.runs.peer_server import PeerServer, check_peer
from loong.runs.spawned_server import free_port

TEMPLATES = {"tp": "--tensor-parallel-size", "dp": "--data-parallel-size"}
FORMS = "write vllm-tpN, vllm-dpN, or NAME URL 'COMMAND'"
_TEMPLATE = re.compile(r"vllm-(tp|dp)([1-9]\d*)")


def peers_of(args: argparse.Namespace) -> dict[str, PeerServer]:
    """Return the peers by name, checked as far as that is possible before anything is measured.

    Raises:
        ConfigError: a peer has another form, is named twice, or cannot be started; see `check_peer`.
    """
    peers: dict[str, PeerServer] = {}
    for words in args.peer:
        name, peer = _peer_of(words, args)
        if name in peers:
            raise ConfigError(f"--peer names {name} twice")
        peers[name] = peer
    return peers


def _peer_of(words: Sequence[str], args: argparse.Namespace) -> tuple[str, PeerServer]:
    match words:
        case [name, url, command]:
            return name, PeerServer.parsed(name, url, command, args.start_timeout)
        case [name] if template := _TEMPLATE.fullmatch(name):
            return name, _vllm(name, template[1], int(template[2]), args)
        case _:
            raise ConfigError(f"--peer {' '.join(words)} is no peer; {FORMS}")


def _vllm(name: str, layout: str, number: int, args: argparse.Namespace) -> PeerServer:
    """Return the server of vLLM with the model, weights and prefix cache that the flags give ours."""
    if args.model is None or not (is_hub_name(args.model) or Path(args.model).exists()):
        raise ConfigError(
            f"--peer {name} needs a --model that vLLM can read: a folder, or ORG/NAME of the hub"
        )
    port = free_port()
    load_format = () if args.load_format is None else ("--load-format", args.load_format)
    prefix_cache = f"--{'no-' if args.enable_prefix_caching is False else ''}enable-prefix-caching"
    sizes = (TEMPLATES[layout], str(number))
    address = ("--host", "127.0.0.1", "--port", str(port))
    command = ("vllm", "serve", args.model, *sizes, *address, *load_format, prefix_cache)
    peer = PeerServer(f"http://127.0.0.1:{port}", command, args.start_timeout, num_gpus=number)
    check_peer(name, peer)
    return peer
