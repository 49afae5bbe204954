"""A request whose grammar takes too long fails alone, on whatever instances and ranks."""

from pathlib import Path

import pytest
from cluster import Cluster
from plans import in_group
from requests_for_tests import SCHEMA, assert_exact, greedy_request, random_prompt, sampled_request

from loong.core.events import ProducedToken
from loong.core.grammar import Grammar, GrammarKind
from loong.core.plan import Transfer
from loong.core.request import FinishReason, Request
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import Policy, make_policy

pytest.importorskip("xgrammar")

AMBIGUOUS = Grammar(  # the work for a token grows fast with the number of tokens before
    GrammarKind.EBNF,
    'root ::= "1" S\nS ::= A S B | B S A | S S | "0" | ""\nA ::= S S S S | "0"\nB ::= S S | A A A | ""',
)
MAX_TOKENS = 100
WAYS: dict[str, tuple[str, Policy]] = {  # a cluster, and a policy
    "alone": ("cluster", in_group(0, num_steps=200)),
    "steps": ("cluster", in_group(1, num_steps=1)),
    "queries": ("cluster", in_group(1, 0, chunk=10, transfer=Transfer.QUERY)),
    "ranks": ("sharded", in_group(0, 1, num_steps=30)),
    "esp": ("sharded", make_policy("esp", PolicyConfig())),
}


def hostile() -> Request:
    bias = tuple((token_id, 90.0) for token_id in b"10")
    params = {"temperature": 0.0, "stop_token_ids": (2,), "logit_bias": bias, "grammar": AMBIGUOUS}
    return sampled_request(random_prompt(5, seed=9), MAX_TOKENS, **params)


def held_to_a_schema() -> Request:
    params = {"temperature": 1.0, "stop_token_ids": (2,), "grammar": SCHEMA}
    return sampled_request(random_prompt(5, seed=5), 15, seed=5, **params)


def tokens(produced: list[ProducedToken]) -> list[ProducedToken]:
    return [token._replace(request_id="") for token in produced]


@pytest.mark.parametrize(("kind", "policy"), list(WAYS.values()), ids=list(WAYS))
def test_it_fails_alone_and_others_have_all_their_tokens(
    request: pytest.FixtureRequest, folder: Path, kind: str, policy: Policy
) -> None:
    cluster: Cluster = request.getfixturevalue(kind)
    free, bound, alone, attack = (
        greedy_request(random_prompt(12, seed=1), 15),
        held_to_a_schema(),
        held_to_a_schema(),
        hostile(),
    )
    expected = cluster.run([alone], policy)[alone.request_id]
    outputs = cluster.run([free, attack, bound], policy, timeout=120)
    *before, last = outputs[attack.request_id]
    assert bytes(token.token_id for token in before) == b"1" + b"0" * (len(before) - 1)
    assert 1 < len(before) < MAX_TOKENS
    assert last.finish_reason is FinishReason.COSTLY
    assert_exact(folder, [free], outputs)
    assert tokens(outputs[bound.request_id]) == tokens(expected)
