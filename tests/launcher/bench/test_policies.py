"""The server that each policy is measured on."""

from pathlib import Path

import pytest

from loong.core.errors import ConfigError
from loong.hardware.memory import MAX_AUTO_TOKENS
from loong.launcher.bench.policies import servers_by_policy
from loong.runs.spawned_server import ServerConfig


def server(num_instances: int, tensor_parallel_size: int = 1, *extra_arguments: str) -> ServerConfig:
    return ServerConfig(None, num_instances, tensor_parallel_size, extra_arguments, 60.0)


def test_policies_of_many_instances_share_what_was_asked_for() -> None:
    asked = server(4, 2)
    assert servers_by_policy(["esp", "static-sp", "replicas"], asked) == dict.fromkeys(
        ["esp", "static-sp", "replicas"], asked
    )


def test_tensor_parallelism_gets_the_same_processes_and_kv_in_one_instance() -> None:
    asked = server(2, 1, "--kv-cache-tokens", "1k", "--max-model-len", "500")
    servers = servers_by_policy(["esp", "tp"], asked)
    assert servers["esp"] == asked
    assert servers["tp"] == server(1, 2, *asked.extra_arguments, "--kv-cache-tokens", "2000")


def test_tensor_parallelism_gets_as_much_kv_as_the_others_choose_for_themselves() -> None:
    servers = servers_by_policy(["tp"], server(2))
    assert servers["tp"] == server(1, 2, "--kv-cache-tokens", str(2 * MAX_AUTO_TOKENS))


def test_tensor_parallelism_on_gpus_fills_their_memory_by_itself() -> None:
    asked = server(2, 1, "--device", "cuda")
    assert servers_by_policy(["tp"], asked)["tp"] == server(1, 2, "--device", "cuda")


def test_one_instance_is_left_as_it_is() -> None:
    asked = server(1, 2)
    assert servers_by_policy(["tp"], asked)["tp"] is asked


@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (3, 1)])
def test_processes_that_the_kv_heads_cannot_be_split_over_are_refused(shape: tuple[int, int]) -> None:
    num_instances, tp_size = shape
    with pytest.raises(ConfigError, match=rf"policy tp .* {num_instances * tp_size} .*num_kv_heads=2"):
        servers_by_policy(["esp", "tp"], server(num_instances, tp_size))


def test_what_serve_would_not_take_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        servers_by_policy(["tp"], server(2, 1, "--kv-cache-tokens", "many"))
    assert "--kv-cache-tokens: 'many'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        servers_by_policy(["tp"], server(2, 1, "--kv-cash-tokens", "1k"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("loong serve: error: there is no flag --kv-cash-tokens; did you mean")


def test_what_a_servers_file_says_counts_too(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text("kv-cache-tokens: 1k\n")
    asked = server(2, 1, "--config", str(tmp_path / "serve.yaml"))
    assert servers_by_policy(["tp"], asked)["tp"].extra_arguments[-2:] == ("--kv-cache-tokens", "2000")
