"""No request learns from its times, or from what is cached, what those with another salt have sent.

Nor has it other times because of a cache in which it finds nothing.
"""

from dataclasses import replace

import pytest
from simulation import simulate, timed_request

from loong.core.events import RequestAborted
from loong.core.request import Request

PROMPT, OTHER = (7,) * 300, (8,) * 300
POLICIES = ["esp", "esp-fixed-2", "esp-disaggregated-1", "replicas"]


def sent(name: str, tokens: tuple[int, ...], salt: str, time: float) -> Request:
    """Return a request that is known by its name."""
    request = timed_request(0, 1, 6, time)
    return replace(request, request_id=name, prompt_token_ids=tokens, cache_salt=salt)


def probed(policy: str, victim: Request, salt: str, delay: float, *, aborts: bool) -> tuple[list[float], int]:
    """Return the times at which a probe gets its tokens, and how much of it was cached."""
    probe = sent("probe", PROMPT, salt, delay)
    incidents = (RequestAborted(0.02, victim.request_id),) if aborts else ()
    run = simulate(policy, [900, 900], [victim, probe], incidents=incidents, keeps_prefixes=True)
    return run.token_times["probe"], run.stats.num_cached_tokens


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("delay", [0.001, 9.0], ids=["while it is computed", "later"])
def test_times_and_cached_tokens_say_nothing_of_other_salts(policy: str, delay: float, aborts: bool) -> None:
    for salt in ("", "mine"):
        same, other = (
            probed(policy, sent("victim", tokens, "theirs", 0.0), salt, delay, aborts=aborts)
            for tokens in (PROMPT, OTHER)
        )
        assert same == other
        assert same[1] == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("delay", [0.001, 9.0], ids=["while it is computed", "later"])
def test_within_a_salt_both_do(policy: str, delay: float) -> None:
    same, other = (
        probed(policy, sent("victim", tokens, "mine", 0.0), "mine", delay, aborts=False)
        for tokens in (PROMPT, OTHER)
    )
    assert (same[1], other[1]) == (299, 0)
    assert same[0] != other[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_where_nothing_is_shared_all_times_are_those_without_a_cache(policy: str) -> None:
    lengths = [(60 + 37 * n % 200, 2 + 11 * n % 30) for n in range(20)]
    requests = [
        replace(timed_request(n, 1, outputs, 0.004 * n), prompt_token_ids=(n,) * prompt)
        for n, (prompt, outputs) in enumerate(lengths)
    ]
    runs = [simulate(policy, [700, 700], requests, keeps_prefixes=keeps) for keeps in (False, True)]
    assert runs[0].token_times == runs[1].token_times
    assert runs[0].stats.num_preemptions == runs[1].stats.num_preemptions
    assert runs[1].stats.num_cached_tokens == 0
