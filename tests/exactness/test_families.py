"""Every family is as exact over several instances and ranks as transformers is on one."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from cluster import Cluster, running_cluster
from families import FAMILIES, write_tiny_model
from plans import in_group
from requests_for_tests import assert_exact, greedy_request, random_prompt

from loong.launcher.local import ClusterConfig


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_tiny_model(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@pytest.fixture(scope="module", params=product(FAMILIES, (1, 2)), ids="{0[0]} tp {0[1]}".format)
def served(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[tuple[Path, Cluster, int]]:
    """A model, four processes that serve it, and the number of instances that they make."""
    family, tp_size = request.param
    folder, num_instances = folders[family], 4 // tp_size
    config = ClusterConfig(str(folder), num_instances=num_instances, tp_size=tp_size, kv_capacity=128)
    with running_cluster(config) as cluster:
        yield folder, cluster, num_instances


def test_any_dop_gives_the_tokens_of_transformers(served: tuple[Path, Cluster, int]) -> None:
    folder, cluster, num_instances = served
    prompts = random_prompt(45, seed=1), random_prompt(30, seed=2)  # rope lengths are 24 and 32
    for dop in range(1, num_instances + 1):
        requests = [greedy_request(prompt, 8) for prompt in prompts]
        group = range(num_instances)[-dop:]
        assert_exact(folder, requests, cluster.run(requests, in_group(*group, chunk=17, num_steps=3)))
