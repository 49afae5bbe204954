"""Each engine gets an equal share of the instances and its own files, and one that hangs is abandoned."""

from dataclasses import replace
from pathlib import Path
from socket import socketpair

import pytest

from loong.core.errors import ConfigError
from loong.engine.client import EngineLimits
from loong.hardware.gpus import visible_devices
from loong.launcher.cli import build_parser
from loong.launcher.serve import engine_processes
from loong.launcher.serve.command import serve_config
from loong.launcher.serve.config import ServeConfig
from loong.launcher.serve.engine_process import EngineProcessConfig
from loong.processes.child import config_line, config_of
from loong.server.remote.client import RemoteEngineClient


def configured(*words: str) -> ServeConfig:
    return serve_config(build_parser(["serve"])[0].parse_args(["serve", *words]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--num-instances", "5"), "--num-instances is 5, but --num-engines 2 needs a multiple of 2"),
        (("--max-instances", "7"), "--max-instances is 7, but --num-engines 2 needs a multiple of 2"),
        (("--kv-events-config", '{"endpoint": "tcp://*:1"}'), "--kv-events-config has one endpoint"),
    ],
)
def test_flags_that_engines_cannot_share_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured("--num-engines", "2", *words)


def test_each_engine_needs_an_instance_on_each_host() -> None:
    whole = configured("--num-engines", "2")
    with pytest.raises(ConfigError, match="each of --num-engines 2 needs one on each of --num-hosts 4"):
        replace(whole, cluster=replace(whole.cluster, hosts="ray", num_hosts=4))
    over_two = replace(whole, cluster=replace(whole.cluster, hosts="ray", num_hosts=2))
    assert [over_two.of_engine(i).cluster.host_ids for i in range(2)] == [(0, 1), (0, 1)]


def test_a_loan_of_engines_on_ray_nodes_is_on_a_host_of_its_own() -> None:
    """The engine that lends chooses the node, so others reach it by the network."""
    whole = configured("--num-engines", "2", "--lend")
    assert set(whole.of_engine(0).cluster.host_ids) == {0}
    over_two = replace(whole, cluster=replace(whole.cluster, hosts="ray", num_hosts=2)).of_engine(0).cluster
    on_loans = [over_two.host_ids[i] for i in over_two.loan_ids]
    assert on_loans == [2, 3, 4, 5]
    assert [over_two.host_ids.count(i) for i in range(2)] == [1, 1]


def test_each_engine_has_its_share_and_its_own_files_and_is_sent_all_of_it(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    whole = configured("--num-engines", "2", "--max-instances", "8", "--decision-log", str(log))
    engines = [whole.of_engine(engine_id) for engine_id in range(2)]
    assert [one.cluster.num_instances for one in engines] == [2, 2]
    assert [one.cluster.world_size for one in engines] == [4, 4]
    assert [one.logs.decisions for one in engines] == [
        tmp_path / "decisions.engine-0.jsonl",
        tmp_path / "decisions.engine-1.jsonl",
    ]
    for one in engines:
        config = EngineProcessConfig(one, str(tmp_path))
        assert config_of(config_line(config), EngineProcessConfig) == config


def test_engines_see_the_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6")
    assert [visible_devices(first, 2)["CUDA_VISIBLE_DEVICES"] for first in (0, 2, 4)] == ["3,5", "6,3", "5,6"]


async def test_an_engine_that_sends_nothing_any_more_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_processes, "ASK_SECONDS", 0.001)
    client = RemoteEngineClient(EngineLimits(1, 1, 1))
    ours, theirs = socketpair()
    with theirs:
        await client.open(ours)
        await engine_processes.until_ended(0, client)
        assert client.ended.is_set()
