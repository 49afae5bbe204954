"""Under random incidents at any time, tokens of requests are those of transformers, and stories are true."""

from pathlib import Path
from random import Random

import pytest
from chaos import chaos
from cluster import After, Cluster
from examples import seeds
from requests_for_tests import assert_exact, expected, greedy_request, random_prompt
from true_stories import assert_true

from loong.core.cost.cost_model import CostModel
from loong.core.plan import IterationPlan
from loong.core.request import Request, RequestId
from loong.core.snapshot import Snapshot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import Policy, make_policy

LENGTHS = (1, 2, 5, 17, 29, 38, 52, 63)
NUM_TOKENS = 10


def random_request(random: Random) -> Request:
    length = random.choice(LENGTHS)
    return greedy_request(random_prompt(length, seed=length), NUM_TOKENS)


@pytest.mark.parametrize(
    "policy", ["esp", "static-sp", "chunked", "esp-fixed-2", "esp-disaggregated-1", "vllm-m"]
)
def test_stories_of_policies_on_real_workers_are_true(predicting: Cluster, policy: str) -> None:
    requests = [greedy_request(random_prompt(length, seed=length), NUM_TOKENS) for length in LENGTHS]
    anchor, *late = requests
    arrivals = {r.request_id: After(anchor.request_id, 1 + n) for n, r in enumerate(late)}
    config = PolicyConfig(max_num_batched_tokens=32, chunk_tokens=16, lease_steps=4)
    leaving = {late[-1].request_id: 3}
    predicting.run(requests, make_policy(policy, config), arrivals=arrivals, leaving=leaving)
    assert_true(predicting.lines, predicting.history)


def aborting(cluster: Cluster, policy: Policy, victims: set[RequestId], random: Random) -> Policy:
    """Return the policy with random aborts of victims, at any time."""

    def plan(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        for view in (*snapshot.waiting, *snapshot.running):
            if view.request_id in victims and random.random() < 0.03:
                victims.remove(view.request_id)
                cluster.abort(view.request_id)
        return policy(snapshot, cost_model)

    return plan


@pytest.mark.parametrize("kind", ["cluster", "sharded", "predicting", "sharded_overlapping"])
@pytest.mark.parametrize("seed", seeds(1, thorough=8))
def test_any_valid_plans_give_the_tokens_of_transformers(
    request: pytest.FixtureRequest, kind: str, folder: Path, seed: int
) -> None:
    any_cluster: Cluster = request.getfixturevalue(kind)
    random = Random(seed)
    survivors, victims = ([random_request(random) for _ in range(4)] for _ in range(2))
    anchor, *late = survivors
    arrivals = {r.request_id: After(anchor.request_id, random.randint(1, 8)) for r in (*late, *victims[:2])}
    policy = aborting(any_cluster, chaos(seed), {r.request_id for r in victims[1:]}, random)
    leaving = {victims[0].request_id: random.randint(1, 8)}
    outputs = any_cluster.run([*survivors, *victims], policy, arrivals=arrivals, leaving=leaving)
    assert_exact(folder, survivors, outputs)
    for victim in victims:
        token_ids, _ = expected(folder, victim.prompt_token_ids, NUM_TOKENS)
        produced = [token.token_id for token in outputs[victim.request_id]]
        assert produced == token_ids[: len(produced)]
    assert_true(any_cluster.lines, any_cluster.history)
