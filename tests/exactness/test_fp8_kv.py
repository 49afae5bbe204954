"""With keys and values in FP8, tokens are the same at every degree, with and without the prefix cache."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from cluster import Cluster
from families import write_tiny_model
from fp8_answers import alone, answers, assert_same
from leak_checks import shared_cluster
from plans import in_group
from requests_for_tests import expected, greedy_request, random_prompt

from loong.launcher.cluster.config import ClusterConfig
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy

NUM_TOKENS = 8
CONFIG = PolicyConfig(max_num_batched_tokens=32, chunk_tokens=16, lease_steps=4)


@pytest.fixture(scope="module", params=["gemma-3", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(request.param, tmp_path_factory.mktemp("model"), head_dim=12)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Cluster]:
    config = ClusterConfig(
        str(folder), num_instances=3, kv_capacity=160, host_kv_capacity=96, kv_cache_dtype="fp8"
    )
    with shared_cluster(config, keeps_prefixes=True) as cluster:
        yield cluster


def prompts_of(seed: int) -> list[tuple[int, ...]]:
    """Return prompts of which some begin alike."""
    random, first = Random(seed), random_prompt(40, seed=seed)
    return [first, *(first[: random.randint(5, 40)] + random_prompt(9, seed=seed + n) for n in (1, 2))]


def test_any_dop_gives_the_tokens_of_one_instance(served: Cluster) -> None:
    prompts = prompts_of(1)
    wanted = [alone(served, greedy_request(prompt, NUM_TOKENS)) for prompt in prompts]
    for dop in (2, 3):
        requests = [greedy_request(prompt, NUM_TOKENS) for prompt in prompts]
        outputs = served.run(requests, in_group(*range(dop), chunk=17, num_steps=3))
        assert_same(answers(requests, outputs), wanted)
    requests = [greedy_request(prompt, NUM_TOKENS) for prompt in prompts]
    assert_same(answers(requests, served.run(requests, make_policy("esp", CONFIG), timeout=60)), wanted)
    assert served.snapshot.stats.num_cached_tokens


def test_answers_are_near_those_of_whole_values(folder: Path, served: Cluster) -> None:
    for prompt in prompts_of(2):
        (token, logprob), *_ = alone(served, greedy_request(prompt, NUM_TOKENS))
        tokens, logprobs = expected(folder, prompt, 1)
        assert logprob == pytest.approx(logprobs[0], abs=0.5)
        assert token == tokens[0] or logprobs[0] < -0.5
