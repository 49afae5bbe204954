"""Reasons why a request reads less of the prefix cache than it could."""

from collections.abc import Sequence
from typing import Any

import pytest
from plans import prefill
from shared_prefixes import PrefixCluster

from loong.core.events import InstanceDraining, InstanceJoined, InstanceLost, PrefixCacheReset
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.instructions import RunBatch
from loong.core.plan import Borrowing, IterationPlan
from loong.state import remembered_owners

PROMPT = tuple(range(100, 120))


class Explained(PrefixCluster):
    """A cluster whose plans say why a request reads less than it could."""

    def why(
        self, request_id: str, tokens: Sequence[int] = PROMPT, *, reads: bool = True, **changes: Any
    ) -> list[str]:
        """Return the reasons for a request that comes, begins, and leaves."""
        self.arrive(request_id, tokens, **changes)
        cached = tuple(c.segment for c in self.view(request_id).cached) if reads else ()
        view = self.view(request_id)
        batch = prefill([view.borrowing(cached) if cached else view], (0,))
        plan = IterationPlan((batch,), borrowings=(Borrowing(request_id, cached),) if cached else ())
        (run,) = [i for i in self.state.commit(plan, self.snapshot()) if isinstance(i, RunBatch)]
        found = [decision.chosen for decision in self.state.misses(plan)]
        self.runs[run.batch_id] = run
        self.abort(request_id)
        self.finish(run.batch_id)
        return found


@pytest.fixture
def cluster() -> Explained:
    """Return a cluster that has the KV of one prompt on instance 0."""
    cluster = Explained(kv_capacity=60)
    cluster.arrive("a", PROMPT)
    cluster.run_to_end("a")
    return cluster


def test_nothing_is_said_of_a_request_that_reads_all_or_goes_on_after_others(cluster: Explained) -> None:
    assert cluster.why("b") == []
    assert cluster.why("c", (*PROMPT, *range(5))) == []
    assert cluster.why("d", tuple(range(500, 510))) == []
    assert cluster.why("e", (900, *PROMPT)) == []


def test_a_request_says_from_which_other_and_where_it_differs(cluster: Explained) -> None:
    assert cluster.why("b", (*PROMPT[:12], 7, 7)) == ["it differs from request a at token 12"]
    assert cluster.why("c", (*PROMPT, 5, 6, 7)) == []
    assert cluster.why("d", (*PROMPT, 5, 6, 8)) == ["it differs from request c at token 22"]
    assert cluster.why("e", (*PROMPT[:12], 7, 8)) == ["it differs from request b at token 13"]


def test_kv_that_is_gone_has_a_cause_and_an_age(cluster: Explained) -> None:
    cluster.arrive("big", tuple(range(500, 548)))
    cluster.run_to_end("big")
    (reason,) = cluster.why("b")
    assert reason.startswith("7 tokens from token 12 on, evicted ")
    assert reason.endswith(" s ago to make room")
    cluster.state.apply(PrefixCacheReset(next(cluster.times)))
    (reason,) = cluster.why("c")
    assert "19 tokens from token 0 on, evicted " in reason
    assert reason.endswith(" by a reset of the cache")
    cluster.state.apply(InstanceLost(next(cluster.times), 0, "test"))
    cluster.state.apply(InstanceJoined(next(cluster.times), ElasticInstance(0, 1, InstanceKind.FULL, 60)))
    (reason,) = cluster.why("d")
    assert "19 tokens from token 0 on, lost with instance 0 " in reason
    cluster.state.apply(InstanceDraining(next(cluster.times), 0))
    cluster.state.apply(InstanceLost(next(cluster.times), 0, "test"))
    cluster.state.apply(InstanceJoined(next(cluster.times), ElasticInstance(0, 1, InstanceKind.FULL, 60)))
    (reason,) = cluster.why("e")
    assert "19 tokens from token 0 on, dropped " in reason
    assert reason.endswith("as instance 0 was to leave")


def test_what_a_policy_does_not_read_is_said(cluster: Explained) -> None:
    assert cluster.why("b", reads=False) == [
        "19 tokens from token 0 on on instance 0, which the policy computes instead"
    ]
    assert cluster.why("c", uses_cache=False) == ["the request asks to read none"]
    assert len(cluster.why("d", num_prompt_logprobs=0)) == 1


def test_of_another_salt_only_the_number_of_tokens_is_said(cluster: Explained) -> None:
    assert cluster.why("b", cache_salt="x") == ["its first 19 tokens are there for another salt"]
    assert cluster.why("c", (*PROMPT[:5], 7), cache_salt="y") == [
        "its first 5 tokens are there for another salt"
    ]
    assert cluster.why("d", cache_salt="x") == []


def test_memory_of_what_was_evicted_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered_owners, "MAX_OWNERS", 3)
    cluster = Explained()
    for number in range(6):
        cluster.arrive(f"r{number}", tuple(range(100 * number, 100 * number + 9)))
        cluster.run_to_end(f"r{number}")
    cluster.state.apply(PrefixCacheReset(next(cluster.times)))
    assert len(cluster.state._requests.owners.by_id) == 3
    is_explained = [bool(cluster.why(f"s{n}", tuple(range(100 * n, 100 * n + 9)))) for n in range(6)]
    assert is_explained == [False] * 3 + [True] * 3
