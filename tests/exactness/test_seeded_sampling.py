"""Sampled tokens depend on the request alone, and end where the request says."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chaos import chaos
from cluster import Cluster
from plans import in_group
from requests_for_tests import SCHEMA, expected, random_prompt, sampled_request
from transformers import AutoModelForCausalLM

from loong.core.errors import ClusterError
from loong.core.events import ProducedToken
from loong.core.grammar import Grammar, GrammarKind
from loong.core.plan import Transfer
from loong.core.request import Continuation, FinishReason
from loong.scheduler.policy import Policy

PROMPT, NUM_TOKENS = random_prompt(37, seed=37), 10
WAYS: dict[str, dict[str, object]] = {
    "temperature": {"temperature": 1.5},
    "top-p": {"temperature": 2.0, "top_p": 0.8},
    "top-k": {"temperature": 2.0, "top_k": 9},
    "min-p": {"temperature": 2.0, "min_p": 0.1},
    "presence": {"temperature": 0.0, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.7, "frequency_penalty": 1.0},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.7},
    "bias": {"temperature": 1.0, "logit_bias": ((5, 4.0), (40, 4.0), (41, -100.0))},
    "schema": {"temperature": 1.0, "grammar": SCHEMA, "stop_token_ids": (2,)},
    "regex": {
        "temperature": 1.0,
        "grammar": Grammar(GrammarKind.REGEX, "([a-f]{2}|[0-9])+"),
        "stop_token_ids": (2,),
    },
    "min tokens": {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": tuple(range(2, 60))},
}
IN_LEASES = in_group(3, 1, num_steps=4), in_group(2, 0, 3, 1, chunk=16, num_steps=3)
STEP_BY_STEP = in_group(0, chunk=7), in_group(1, 0, 2, chunk=10, transfer=Transfer.QUERY), chaos(1)
# Two for each of the ways to sample.
POLICIES: list[tuple[Policy, Policy]] = [
    (IN_LEASES[n % len(IN_LEASES)], STEP_BY_STEP[n % len(STEP_BY_STEP)]) for n in range(len(WAYS))
]


@pytest.mark.parametrize(
    ("params", "policies"), list(zip(WAYS.values(), POLICIES, strict=True)), ids=list(WAYS)
)
def test_a_seed_gives_the_same_tokens_at_any_dop_in_any_chunks_and_when_computed_again(
    cluster: Cluster, params: Mapping[str, object], policies: tuple[Policy, Policy]
) -> None:
    def drawn(policy: Policy) -> list[list[ProducedToken]]:
        requests = [sampled_request(PROMPT, NUM_TOKENS, seed=seed, **params) for seed in (1, 2)]
        outputs = cluster.run(requests, policy)
        return [[t._replace(request_id="") for t in outputs[request.request_id]] for request in requests]

    alone = drawn(in_group(0))
    assert (alone[0] == alone[1]) == (params["temperature"] == 0)
    for policy in policies:
        assert drawn(policy) == alone


@pytest.mark.parametrize("params", list(WAYS.values()), ids=list(WAYS))
def test_an_output_that_another_engine_began_goes_on_as_if_it_had_stayed(
    cluster: Cluster, params: Mapping[str, object]
) -> None:
    request = sampled_request(PROMPT, NUM_TOKENS, seed=1, **params)
    whole = cluster.run([request], in_group(0))[request.request_id]
    begun = [
        replace(
            request,
            request_id=f"{request.request_id}-{number}",
            continues=Continuation(tuple(token.token_id for token in whole[:number]), 0.5),
        )
        for number in range(len(whole))
    ]
    outputs = cluster.run(begun, chaos(2))
    for number, continued in enumerate(begun):
        rest = [t._replace(request_id=request.request_id) for t in outputs[continued.request_id]]
        assert rest == whole[number:]


def test_an_output_that_keeps_to_a_schema_is_json_and_ends_there(cluster: Cluster) -> None:
    params = {"temperature": 3.0, "grammar": SCHEMA, "stop_token_ids": (2,)}
    requests = [sampled_request(PROMPT, 60, seed=seed, **params) for seed in range(6)]
    outputs = cluster.run(requests, in_group(0, 3, 1, chunk=20, num_steps=5))
    for *tokens, last in outputs.values():
        if last.finish_reason is FinishReason.STOP:
            value = json.loads(bytes(token.token_id for token in tokens))
            assert len(value) >= 2
            assert all(type(item) is int for item in value)
    assert {tokens[-1].finish_reason for tokens in outputs.values()} >= {FinishReason.STOP}


def test_a_request_whose_schema_is_none_never_arrives_and_harms_no_other(cluster: Cluster) -> None:
    no_schema = Grammar(GrammarKind.JSON_SCHEMA, '{"not":{}}')
    wrong = sampled_request(PROMPT, NUM_TOKENS, grammar=no_schema, stop_token_ids=(2,))
    with pytest.raises(ClusterError, match="could not compile a grammar"):
        cluster.run([wrong], in_group(1, 2))
    assert not cluster.log
    right = sampled_request(PROMPT, NUM_TOKENS, temperature=0.0)
    assert len(cluster.run([right], in_group(1, 2))[right.request_id]) == NUM_TOKENS


@pytest.mark.parametrize("min_tokens", [0, 4, 8])
def test_a_stop_token_ends_the_output_once_it_is_long_enough(
    cluster: Cluster, folder: Path, min_tokens: int
) -> None:
    """Greedy: before `min_tokens` the stop token cannot be drawn, and the likeliest other is."""
    tokens, _ = expected(folder, PROMPT, NUM_TOKENS)
    request = sampled_request(
        PROMPT, NUM_TOKENS, temperature=0.0, min_tokens=min_tokens, stop_token_ids=(tokens[3],)
    )
    produced = cluster.run([request], in_group(1, 2, num_steps=20))[request.request_id]
    token_ids = [token.token_id for token in produced]
    first = tokens.index(tokens[3])
    assert token_ids[: max(first, min_tokens)].count(tokens[3]) == 0
    assert token_ids[:first] == tokens[:first]
    if min_tokens <= first:
        assert token_ids == tokens[: first + 1]
    is_stopped = token_ids[-1] == tokens[3]
    assert produced[-1].finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
    assert is_stopped or len(produced) == NUM_TOKENS


def test_log_probabilities_of_the_likeliest_tokens_are_those_of_transformers(
    cluster: Cluster, folder: Path
) -> None:
    request = sampled_request(PROMPT, NUM_TOKENS, temperature=1.2, seed=5, num_logprobs=5)
    produced = cluster.run([request], in_group(0, 3, 1, chunk=20, num_steps=3))[request.request_id]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = model(torch.tensor([PROMPT]), use_cache=True)
    for token in produced:
        logprobs = output.logits[0, -1].detach().log_softmax(-1)
        values, ids = logprobs.topk(5)
        assert token.logprobs is not None
        assert [token_id for token_id, _ in token.logprobs.top] == ids.tolist()
        assert [value for _, value in token.logprobs.top] == pytest.approx(values.tolist(), abs=1e-4, rel=0)
        assert token.logprobs.chosen == pytest.approx(float(logprobs[token.token_id]), abs=1e-4, rel=0)
        output = model(
            torch.tensor([[token.token_id]]), past_key_values=output.past_key_values, use_cache=True
        )
