"""Choices of one request have the tokens of requests of their own, and hold their prompt's KV once."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from chaos import chaos
from cluster import Cluster
from examples import seeds
from plans import decode, in_group, move, plannable
from requests_for_tests import SCHEMA, assert_exact, greedy_request, random_prompt, sampled_request

from loong.core.cost.cost_model import CostModel
from loong.core.events import ProducedToken, TokensProduced
from loong.core.instructions import RunBatch
from loong.core.plan import IterationPlan, Preemption, Transfer
from loong.core.request import Request
from loong.core.snapshot import Snapshot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import Policy, make_policy

PROMPT, NUM_TOKENS, SEED = random_prompt(37, seed=37), 10, 5
WAYS: dict[str, dict[str, object]] = {
    "plain": {"temperature": 1.5},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.7, "presence_penalty": 0.5},
    "min tokens": {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": tuple(range(2, 60))},
    "logprobs": {"temperature": 1.0, "num_logprobs": 2},
    "bias": {"temperature": 1.0, "logit_bias": ((5, 4.0), (40, 4.0), (41, -100.0))},
    "schema": {"temperature": 3.0, "grammar": SCHEMA, "stop_token_ids": (2,)},
}
POLICIES: dict[str, Policy] = {
    "alone": in_group(0),
    "chunks": in_group(3, 1, chunk=7, num_steps=4),
    "queries": in_group(1, 0, 2, chunk=10, transfer=Transfer.QUERY),
    "kept by one": in_group(2, 0, 3, 1, keep_on=[2], num_steps=3),
    "esp": make_policy("esp", PolicyConfig()),
}


def token_ids(tokens: list[ProducedToken]) -> list[int]:
    return [token.token_id for token in tokens]


def family(num_choices: int, prompt: tuple[int, ...] = PROMPT, /, **params: object) -> Request:
    request = sampled_request(prompt, NUM_TOKENS, seed=SEED, **params)
    return replace(request, num_choices=num_choices)


@pytest.mark.parametrize(("number", "params"), list(enumerate(WAYS.values())), ids=list(WAYS))
def test_a_choice_has_the_tokens_of_a_request_with_its_seed(
    cluster: Cluster, number: int, params: Mapping[str, object]
) -> None:
    """Every second policy runs every second way to sample."""
    singles = [sampled_request(PROMPT, NUM_TOKENS, seed=SEED + i, **params) for i in range(3)]
    alone = cluster.run(singles, in_group(0))
    expected = [token_ids(alone[single.request_id]) for single in singles]
    assert len({*map(tuple, expected)}) == len(singles)
    for policy in list(POLICIES.values())[number % 2 :: 2]:
        request = family(len(singles), **params)
        outputs = cluster.run([request], policy)
        assert [token_ids(outputs[i]) for i in request.choice_ids] == expected


@pytest.mark.parametrize("policy", list(POLICIES.values()), ids=list(POLICIES))
def test_greedy_choices_are_all_those_of_transformers(cluster: Cluster, folder: Path, policy: Policy) -> None:
    request = replace(greedy_request(PROMPT, NUM_TOKENS), num_choices=3)
    assert_exact(folder, request.choices(), cluster.run([request], policy))


def test_a_prompt_is_computed_once_and_its_kv_is_there_once(cluster: Cluster) -> None:
    most_used = 0

    def plan(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        nonlocal most_used
        most_used = max(most_used, snapshot.kv_used)
        return in_group(0)(snapshot, cost_model)

    prompt = random_prompt(140, seed=1)  # of which the instance has no room for two
    request = family(5, prompt)
    cluster.run([request], plan)
    reported = [event for event in cluster.log if isinstance(event, RunBatch)]
    assert sum(len(given.token_ids) for run in reported for given in run.inputs) == 140 + 5 * (NUM_TOKENS - 1)
    first = next(event for event in cluster.log if isinstance(event, TokensProduced))
    assert {t.request_id for t in first.tokens} == set(request.choice_ids)
    assert 140 < most_used <= 140 + 5 * (NUM_TOKENS - 1)


def test_a_choice_that_leaves_disturbs_no_other(cluster: Cluster) -> None:
    request = family(4, temperature=1.5)
    ids = list(request.choice_ids)
    whole = cluster.run([request], in_group(0, 1))
    again = family(4, temperature=1.5)
    leaving = dict(zip(again.choice_ids, (1, 3, 6), strict=False))
    outputs = cluster.run([again], in_group(0, 1, num_steps=2), leaving=leaving)
    for choice, request_id in zip(again.choices(), ids, strict=True):
        reported = token_ids(outputs[choice.request_id])
        assert reported == token_ids(whole[request_id])[: len(reported)]
    assert len(outputs[again.choice_ids[3]]) == NUM_TOKENS


def test_a_choice_that_ends_with_its_first_token_leaves_the_prompt_to_the_others(cluster: Cluster) -> None:
    drawn = cluster.run([request := family(4, temperature=1.5)], in_group(0))
    firsts = [drawn[i][0].token_id for i in request.choice_ids]
    again = family(4, temperature=1.5, stop_token_ids=(firsts[0],))
    outputs = cluster.run([again], in_group(0))
    for choice, before, first in zip(again.choices(), request.choices(), firsts, strict=True):
        reported = token_ids(outputs[choice.request_id])
        assert reported == token_ids(drawn[before.request_id])[: len(reported)]
        assert (len(reported) == 1) == (first == firsts[0])


def test_a_choice_may_move_or_be_computed_again_while_the_others_go_on(cluster: Cluster) -> None:
    request = family(3, temperature=1.5)
    first_id, moved_id, preempted_id = request.choice_ids

    def plan(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        views = {view.request_id: view for view in plannable(snapshot)}
        moved, preempted = views.get(moved_id), views.get(preempted_id)
        if moved is not None and moved.placement.instance_ids == (0,) and snapshot.instance[1].is_idle:
            return IterationPlan(migrations=move(moved, 0, 1))
        if preempted is not None and preempted.borrowed and preempted.num_output_tokens == 4:
            return IterationPlan(preemptions=(Preemption(preempted_id),))
        if moved is not None and moved.placement.instance_ids == (1,) and snapshot.instance[1].is_idle:
            return IterationPlan((decode([moved], (1,), {moved_id: 1}),))
        others = replace(
            snapshot,
            waiting=tuple(v for v in snapshot.waiting if v.request_id != moved_id),
            running=tuple(v for v in snapshot.running if v.request_id != moved_id),
        )
        return in_group(0)(others, cost_model)

    outputs = cluster.run([request], plan)
    expected = cluster.run([again := family(3, temperature=1.5)], in_group(0))
    for choice, other in zip(request.choices(), again.choices(), strict=True):
        assert token_ids(outputs[choice.request_id]) == token_ids(expected[other.request_id]), first_id


@pytest.mark.parametrize("seed", seeds(1, thorough=6))
def test_any_valid_plans_give_each_choice_the_tokens_of_its_seed(any_cluster: Cluster, seed: int) -> None:
    random = Random(seed)
    lengths = [random.choice((1, 5, 17, 38, 63)) for _ in range(3)]
    requests = [family(random.randint(2, 4), random_prompt(n, seed=n), temperature=1.2) for n in lengths]
    choices = [choice for request in requests for choice in request.choices()]
    leaving = {choice.request_id: random.randint(1, 8) for choice in choices if random.random() < 0.3}
    outputs = any_cluster.run(requests, chaos(seed), leaving=leaving)
    for request in requests:
        singles = [replace(choice, request_id=f"{choice.request_id}-alone") for choice in request.choices()]
        alone = any_cluster.run(singles, in_group(0, 1))
        for choice, single in zip(request.choices(), singles, strict=True):
            reported = token_ids(outputs[choice.request_id])
            assert len(reported) == leaving.get(choice.request_id, NUM_TOKENS)
            assert reported == token_ids(alone[single.request_id])[: len(reported)]
