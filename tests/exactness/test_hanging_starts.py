"""A worker that hangs in its start says where. It is ended after a time limit, and may start again."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep

import pytest
from child_processes import own_forked
from cluster import Cluster, running_cluster
from families import write_tiny_model
from requests_for_tests import assert_exact, greedy_request, random_prompt

from loong.core.errors import ClusterError
from loong.executor.recovery import Backoff
from loong.launcher.cluster.config import ClusterConfig
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy

WORKER = "loong.worker.process"
TIMEOUT = 15.0  # seconds, in which workers start on a busy machine
LATE = f"instance 1 did not start: it was not ready within {TIMEOUT:g} s"
REQUESTS = [greedy_request(random_prompt(30 + i, seed=i), 6) for i in range(3)]
EVERYWHERE = make_policy("static-sp", PolicyConfig())


@contextmanager
def readers_hang(file: Path) -> Iterator[None]:
    """Opening the file for reading blocks inside this context."""
    aside = file.rename(file.with_suffix(".aside"))
    os.mkfifo(file)
    try:
        yield
    finally:
        aside.replace(file)


@contextmanager
def with_model(folder: Path, num_instances: int, most: int) -> Iterator[tuple[Cluster, Path]]:
    """A cluster that starts lost instances again, and its model."""
    model = write_tiny_model("llama", folder / "model")
    config = ClusterConfig(
        str(model),
        num_instances=num_instances,
        max_instances=most,
        kv_capacity=128,
        start_timeout=TIMEOUT,
    )
    with running_cluster(config, backoff=Backoff(first=2.0)) as cluster:
        yield cluster, model


def wait_for(text: str, caplog: pytest.LogCaptureFixture, count: int) -> None:
    """Return once a text was logged so often."""
    for _ in range(round(count * 60 / 0.05)):
        if caplog.text.count(text) == count:
            return
        sleep(0.05)
    raise TimeoutError(text)


def test_the_first_start_ends_by_the_names_of_the_instances(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny_model("llama", tmp_path / "model")
    config = ClusterConfig(str(folder), num_instances=2, kv_capacity=128, start_timeout=1.0)
    message = r"instance (\d) did not start: it was not ready within 1 s, nor were instances \[(\d)\]"
    error = pytest.raises(ClusterError)
    with error as caught, readers_hang(folder / "config.json"), running_cluster(config, backoff=Backoff()):
        pass
    found = re.fullmatch(message, str(caught.value))
    assert found is not None
    assert {*found.groups()} == {"0", "1"}
    assert "was lost" not in caplog.text, "one message is enough"
    assert "the threads of the worker of instance 0" in capfd.readouterr().err


def test_an_instance_that_starts_again_does_so_until_it_is_ready(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = set(own_forked(WORKER))
    with with_model(tmp_path, 2, 2) as (cluster, model):
        with readers_hang(model / "config.json"):
            os.kill(own_forked(WORKER, foreign)[-1], signal.SIGKILL)
            wait_for(LATE, caplog, 1)
        cluster.wait_until(lambda snapshot: snapshot.stats.num_joins == 1)
        assert_exact(model, REQUESTS, cluster.run(REQUESTS, EVERYWHERE))


def test_so_does_one_that_is_added(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with with_model(tmp_path, 1, 2) as (cluster, model):
        with readers_hang(model / "config.json"):
            cluster.scale(2)
            wait_for(LATE, caplog, 2)  # the second time, it starts after a pause
        cluster.wait_until(lambda snapshot: snapshot.stats.num_joins == 1)
        assert_exact(model, REQUESTS, cluster.run(REQUESTS, EVERYWHERE))
