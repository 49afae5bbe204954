"""Every family is as exact over several instances and ranks as transformers is on one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from families import FAMILIES, write_tiny_model
from leak_checks import shared_cluster
from plans import in_group
from requests_for_tests import assert_exact, greedy_request, random_prompt

from loong.core.instructions import RunBatch
from loong.launcher.cluster.config import ClusterConfig
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy

# How positions are spread over more instances is the same for all, but for a rope that depends on the length.
SIZES = [*((family, 2, 2) for family in FAMILIES), ("llama", 4, 1), ("llama-dynamic", 4, 2)]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_tiny_model(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@pytest.fixture(scope="module", params=SIZES, ids="{0[0]} on {0[1]} of tp {0[2]}".format)
def served(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[tuple[Path, Cluster]]:
    """Yield a model, and the instances that serve it."""
    family, num_instances, tp_size = request.param
    folder = folders[family]
    config = ClusterConfig(
        str(folder), num_instances=num_instances, memory_instances=1, tp_size=tp_size, kv_capacity=128
    )
    with shared_cluster(config) as cluster:
        yield folder, cluster


def test_any_dop_gives_the_tokens_of_transformers(served: tuple[Path, Cluster]) -> None:
    folder, cluster = served
    prompts = random_prompt(45, seed=1), random_prompt(30, seed=2)  # rope lengths are 24 and 32
    for dop in range(1, len(cluster.full_ids) + 1):
        requests = [greedy_request(prompt, 8) for prompt in prompts]
        group = cluster.full_ids[-dop:]
        assert_exact(folder, requests, cluster.run(requests, in_group(*group, chunk=17, num_steps=3)))


def test_kv_on_a_memory_instance_gives_the_tokens_of_transformers(served: tuple[Path, Cluster]) -> None:
    folder, cluster = served
    requests = [greedy_request(random_prompt(length, seed=length), 8) for length in (45, 30)]
    policy = make_policy("lamina", PolicyConfig(max_num_batched_tokens=64, lease_steps=3))
    assert_exact(folder, requests, cluster.run(requests, policy))
    runs = [item for item in cluster.log if isinstance(item, RunBatch)]
    assert {run.holder_ids for run in runs if run.plan.num_steps > 1} == {cluster.memory_ids}
