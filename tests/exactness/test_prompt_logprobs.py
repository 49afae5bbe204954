"""Log probabilities of prompts are those of transformers, an entry for each token but the first."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from chaos import chaos
from cluster import Cluster
from covering import pairwise
from examples import seeds
from plans import both, decode, in_group, plannable, prefill
from requests_for_tests import (
    assert_exact,
    assert_prompt_exact,
    greedy_request,
    random_prompt,
    scored_request,
)

from loong.core.cost.cost_model import CostModel
from loong.core.instructions import RunBatch, RunScoredBatch
from loong.core.plan import IterationPlan, Preemption, Transfer
from loong.core.request import Request
from loong.core.snapshot import Snapshot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import Policy, make_policy


def run_exactly(cluster: Cluster, folder: Path, requests: Sequence[Request], policy: Policy) -> None:
    """Run these, of which tokens and prompts are as transformers has them."""
    assert_exact(folder, requests, cluster.run(requests, policy))
    for request in requests:
        assert_prompt_exact(folder, request, cluster.prompt_logprobs.get(request.request_id))


@pytest.mark.parametrize(("dop", "chunk", "transfer"), pairwise([1, 2, 3, 4], [1, 7, None], Transfer))
def test_prompts_are_scored_in_chunks_of_any_size_at_any_dop(
    cluster: Cluster, folder: Path, dop: int, chunk: int | None, transfer: Transfer
) -> None:
    requests = [
        scored_request(70, 3),
        scored_request(1, 3),
        scored_request(33, 0),
        scored_request(2, 3, num_tokens=1),
    ]
    policy = in_group(*cluster.full_ids[-dop:], chunk=chunk, transfer=transfer, num_steps=4)
    run_exactly(cluster, folder, requests, policy)


@pytest.mark.parametrize("chunk", [5, None])
@pytest.mark.parametrize("dop", [1, 2])
def test_ranks_of_an_instance_score_together(
    sharded: Cluster, folder: Path, dop: int, chunk: int | None
) -> None:
    policy = in_group(*sharded.full_ids[-dop:], chunk=chunk)
    run_exactly(sharded, folder, [scored_request(41, 20), scored_request(26, 3)], policy)


def test_a_batch_may_score_some_prompts_beside_others_and_tokens(cluster: Cluster, folder: Path) -> None:
    group = cluster.full_ids[:3]

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        views = plannable(snapshot)
        old, new = [v for v in views if v.is_decoding], [v for v in views if not v.is_decoding]
        if not views:
            return IterationPlan()
        tokens = decode(old, group, {v.request_id: group[v.num_known_tokens % 3] for v in old})
        return IterationPlan((both(prefill(new, group, num_tokens=9), tokens),))

    plain = greedy_request(random_prompt(50, seed=5), 8)
    run_exactly(cluster, folder, [scored_request(7, 3, num_tokens=8), scored_request(60, 3), plain], policy)
    assert plain.request_id not in cluster.prompt_logprobs


@pytest.mark.parametrize("when", [1, 4, 6])
def test_a_preempted_request_has_each_entry_once(any_cluster: Cluster, folder: Path, when: int) -> None:
    """It is preempted once, before the end of its prompt or after, and computed again in other chunks."""
    request, has_been = scored_request(36, 3, num_tokens=6), False
    before, after = (in_group(*any_cluster.full_ids[-2:], chunk=chunk) for chunk in (9, 14))

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        nonlocal has_been
        for view in plannable(snapshot):
            if not has_been and view.num_computed_tokens // 9 + view.num_output_tokens >= when:
                has_been = True
                return IterationPlan(preemptions=(Preemption(view.request_id),))
        return (after if has_been else before)(snapshot, cost_model)

    run_exactly(any_cluster, folder, [request], policy)
    assert has_been
    batches = [reported for reported in any_cluster.log if isinstance(reported, RunBatch)]
    has_ended = [any(given.num_output_tokens for given in batch.inputs) for batch in batches]
    assert [isinstance(batch, RunScoredBatch) for batch in batches] == [not ended for ended in has_ended]


def test_choices_have_the_prompt_in_common(cluster: Cluster, folder: Path) -> None:
    request = replace(scored_request(30, 3), num_choices=3)
    run_exactly(cluster, folder, [request], in_group(2, 0, chunk=11))


def test_batches_that_follow_others_are_scored_too(predicting: Cluster, folder: Path) -> None:
    requests = [scored_request(90, 3), scored_request(40, 3), scored_request(5, 3, num_tokens=9)]
    run_exactly(predicting, folder, requests, make_policy("esp", PolicyConfig(max_num_batched_tokens=32)))


@pytest.mark.parametrize("seed", seeds(1, thorough=6))
def test_any_plans_give_one_entry_a_position(any_cluster: Cluster, folder: Path, seed: int) -> None:
    requests = [scored_request(length, 2) for length in Random(seed).sample(range(2, 60), 4)]
    run_exactly(any_cluster, folder, requests, chaos(seed))


def test_requests_that_ask_for_nothing_are_reported_as_before(cluster: Cluster) -> None:
    cluster.run([greedy_request(random_prompt(20, seed=1), 3)], in_group(0, 1))
    assert {type(reported) for reported in cluster.log if isinstance(reported, RunBatch)} == {RunBatch}
    assert not cluster.prompt_logprobs
