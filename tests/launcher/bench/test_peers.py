"""Servers of other engines, which a benchmark starts by their commands."""

import json
import shlex
import socket
import sys
from pathlib import Path

import pytest
from stub_servers import STUB

from loong.core.errors import ConfigError
from loong.launcher.bench import command as bench
from loong.launcher.bench.peers import peers_of
from loong.launcher.parser import CommandParser
from loong.runs.peer_server import PeerServer
from loong.runs.spawned_server import free_port
from loong.workloads.errors import ServerUnusableError

pytestmark = pytest.mark.usefixtures("stub_server")
QUICK = (
    *("--length-scale", "1/64", "--num-requests", "9", "--num-warmups", "1", "--seed", "1"),
    *("--goodput", "ttft:60000"),
)
AT_ONCE = (*QUICK, "--request-rate", "inf")
MODEL = "meta-llama/Llama-3.1-8B"


def parser() -> CommandParser:
    made = CommandParser(prog="loong")
    bench.add_parser(made.add_subparsers())
    return made


def run_bench(*flags: str) -> int:
    args = parser().parse_args(["bench", *flags])
    code: int = args.run(args)
    return code


def stub_command(port: int, *flags: str) -> str:
    return shlex.join([sys.executable, str(STUB), "serve", "--policy", "x", "--port", str(port), *flags])


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_peer_gets_the_load_of_our_server_and_ends(tmp_path: Path) -> None:
    port = free_port()
    peer = ("--peer", "other engine", f"http://127.0.0.1:{port}/v1/", stub_command(port))
    rates = ("--request-rate", "200,300")
    flags = ("--policy", "esp", *peer, "--num-gpus", "4", *rates, "--output-dir", str(tmp_path))
    assert run_bench(*QUICK, *flags) == 0
    assert not is_listening(port)
    document = json.loads((tmp_path / "results.json").read_text())
    ours, theirs = ([r for r in document["runs"] if r["policy"] == name] for name in ("esp", "other engine"))
    assert [run["completed"] for run in (*ours, *theirs)] == [9] * 4
    assert [run["input_lens"] for run in ours] == [run["input_lens"] for run in theirs]
    assert [(run["num_devices"], run["device_unit"]) for run in theirs] == [(4, "GPU")] * 2
    assert theirs[0]["server"]["command"] == stub_command(port)
    assert (tmp_path / "server-other-engine.log").is_file()
    for run in theirs:
        assert run["output_throughput_per_device"] == pytest.approx(run["output_throughput"] / 4)


def test_a_peer_that_ends_before_it_is_healthy_shows_its_last_lines() -> None:
    command = shlex.join([sys.executable, "-c", "raise SystemExit('this engine needs a GPU')"])
    peer = ("--peer", "other", f"http://127.0.0.1:{free_port()}", command)
    with pytest.raises(ServerUnusableError, match=r"(?s)ended with status 1; .*this engine needs a GPU"):
        run_bench(*AT_ONCE, *peer)


def test_a_peer_that_is_never_healthy_is_given_up_and_ended() -> None:
    port = free_port()
    peer = ("--peer", "other", f"http://127.0.0.1:{port}", stub_command(port, "--never-healthy"))
    with pytest.raises(ServerUnusableError, match=r"was not healthy within 0\.5 s"):
        run_bench(*AT_ONCE, *peer, "--start-timeout", "0.5")
    assert not is_listening(port)


def test_a_peer_whose_port_is_in_use_is_refused_before_anything_runs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"--peer other: the port of {url} is in use"):
            run_bench(*AT_ONCE, "--policy", "esp", "--peer", "other", url, sys.executable)
    assert not Path("loong-runs").exists()


@pytest.mark.parametrize(
    ("name", "size", "flags", "words"),
    [
        ("vllm-tp2", 2, [], "--tensor-parallel-size 2 ADDRESS --enable-prefix-caching"),
        (
            *("vllm-dp16", 16, ["--no-enable-prefix-caching", "--load-format", "dummy"]),
            "--data-parallel-size 16 ADDRESS --load-format dummy --no-enable-prefix-caching",
        ),
    ],
)
def test_a_template_is_vllm_with_our_model_and_prefix_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: int, flags: list[str], words: str
) -> None:
    program = tmp_path / "vllm"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    [(found, peer)] = peers_of(
        parser().parse_args(["bench", "--model", MODEL, "--peer", name, *flags])
    ).items()
    port = peer.base_url.removeprefix("http://127.0.0.1:")
    words = words.replace("ADDRESS", f"--host 127.0.0.1 --port {port}")
    command = ("vllm", "serve", MODEL, *words.split())
    assert (found, peer) == (name, PeerServer(peer.base_url, command, 600.0, num_gpus=size))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            ["--peer", "vllm-tp0", "--model", MODEL],
            "--peer vllm-tp0 is no peer; write vllm-tpN, vllm-dpN, or",
        ),
        (["--peer", "other", "http://127.0.0.1:1"], "--peer other http://127.0.0.1:1 is no peer"),
        (["--peer", "vllm-tp2"], "--peer vllm-tp2 needs a --model that vLLM can read"),
        (["--peer", "vllm-tp2", "--model", "llama-3.1-8b"], "--peer vllm-tp2 needs a --model that vLLM"),
        (["--peer", "a", "http://127.0.0.1:1", "no-such-engine serve"], "'no-such-engine' does not exist"),
        (["--peer", "a", "http://127.0.0.1:1", "'"], '--peer a: "\'" cannot be split into words'),
        (["--peer", "a", "127.0.0.1:1", "true"], "--peer a: '127.0.0.1:1' is not a URL"),
        (["--peer", "a", "http://127.0.0.1:1", "true"] * 2, "--peer names a twice"),
        (["--peer", "esp", "http://127.0.0.1:1", "true", "--policy", "esp"], "--peer esp has the name of a"),
        (
            ["--peer", "a", "http://127.0.0.1:1", "true", "--base-url", "a=http://127.0.0.1:2"],
            "--base-url and --peer both name a",
        ),
        (["--peer", "a", "http://127.0.0.1:1", "true"], "--length-scale and --request-rate are not chosen"),
        (["--base-url", "a=http://x:1", "--num-gpus", "b=2"], "--num-gpus b=2 is of no server"),
        (["--base-url", "a=http://x:1", "--num-gpus", "0"], "--num-gpus '0' is no whole number"),
        (["--policy", "esp", "--num-gpus", "2"], "--num-gpus 2 is of no server"),
    ],
)
def test_a_peer_that_cannot_work_is_named(flags: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_bench(*flags)
    assert complaint in str(error.value)
