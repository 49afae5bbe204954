"""A worker that hangs in its start says where. It is ended after a time limit, and may start again."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep

import pytest
from child_processes import own_forked
from cluster import running_cluster
from families import write_tiny_model
from requests_for_tests import assert_exact, greedy_request, random_prompt

from loong.core.errors import ClusterError
from loong.executor.recovery import Backoff
from loong.launcher.serve.local import ClusterConfig
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy

WORKER = "loong.worker.process"
TIMEOUT = 15.0  # seconds, in which workers start on a busy machine


@contextmanager
def readers_hang(file: Path) -> Iterator[None]:
    """Whoever opens a file meanwhile waits for ever."""
    aside = file.rename(file.with_suffix(".aside"))
    os.mkfifo(file)
    yield
    aside.replace(file)


def test_the_first_start_ends_by_the_name_of_the_instance(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_model("llama", tmp_path / "model")
    config = ClusterConfig(str(folder), num_instances=1, kv_capacity=128, start_timeout=1.0)
    late = pytest.raises(ClusterError, match="instance 0 did not start: it was not ready within 1 s")
    with readers_hang(folder / "config.json"), late, running_cluster(config):
        pass
    assert "the threads of the worker of instance 0" in capfd.readouterr().err


def test_an_instance_that_starts_again_does_so_until_it_is_ready(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny_model("llama", tmp_path / "model")
    foreign = set(own_forked(WORKER))
    config = ClusterConfig(str(folder), num_instances=2, kv_capacity=128, start_timeout=TIMEOUT)
    requests = [greedy_request(random_prompt(30 + i, seed=i), 6) for i in range(3)]
    late = f"instance 1 did not start: it was not ready within {TIMEOUT:g} s"
    with running_cluster(config, backoff=Backoff(first=2.0)) as cluster:
        with readers_hang(folder / "config.json"):
            os.kill(own_forked(WORKER, foreign)[-1], signal.SIGKILL)
            while late not in caplog.text:
                sleep(0.05)
        cluster.wait_until(lambda snapshot: snapshot.stats.num_joins == 1)
        assert_exact(folder, requests, cluster.run(requests, make_policy("static-sp", PolicyConfig())))
