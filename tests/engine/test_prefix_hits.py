"""Tokens that requests read from the prefix cache are counted as they begin, and reported with them."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from simulation import instances_with, timed_request

from loong.core.applied import Applied
from loong.core.cached_tokens import CachedTokens
from loong.core.events import Event, PrefixCacheReset, RequestAborted, RequestArrived
from loong.core.instance import ESPGroup
from loong.core.placement import KVSegment
from loong.core.plan import BatchPlan, Borrowing, Failure, IterationPlan, QueryBlock, Transfer
from loong.core.request import Request
from loong.core.snapshot import Snapshot
from loong.engine.loop import Scheduling
from loong.engine.prefix_hits import PrefixCounts, PrefixHits
from loong.executor.simulated import SimulatedExecutor
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.policy import make_policy
from loong.state.cluster_state import ClusterState

NOTHING = Snapshot(0.0, ())


def batch_of(*request_ids: str) -> BatchPlan:
    blocks = tuple(QueryBlock(request_id, range(8, 10), 0, Transfer.KV) for request_id in request_ids)
    return BatchPlan(ESPGroup((0,)), blocks, ())


def reading(request_id: str, *instance_ids: int) -> Borrowing:
    """Return that a request reads four tokens on each of these instances."""
    places = enumerate(instance_ids)
    return Borrowing(request_id, tuple([KVSegment("kv-1", range(4 * n, 4 * n + 4), i) for n, i in places]))


class Watched:
    """Counts of plans that are made up."""

    def __init__(self, *requests: Request) -> None:
        self.taken: list[CachedTokens] = []
        self.hits = PrefixHits(self.taken.append)
        for request in requests:
            self.hits.on_event(RequestArrived(0.0, request), Applied())

    def plan(self, *batches: BatchPlan, borrowings: Sequence[Borrowing] = (), failed: str = "") -> None:
        failures = (Failure(failed, "no room"),) if failed else ()
        plan = IterationPlan(batches, borrowings=tuple(borrowings), failures=failures)
        self.hits.on_plan((), NOTHING, plan, ())


def test_what_a_request_reads_as_it_begins_is_counted_by_place() -> None:
    watched = Watched(timed_request(1, 10, 2), timed_request(2, 20, 2))
    watched.plan(batch_of("r001", "r002"), borrowings=[reading("r001", 0, 2)])
    assert watched.taken == [CachedTokens("r001", 8)]
    assert watched.hits.counts == PrefixCounts(30, 8, {0: 4, 2: 4})


def test_a_request_that_does_not_begin_reads_nothing_yet() -> None:
    watched = Watched(timed_request(1, 10, 2))
    watched.plan(borrowings=[reading("r001", 0)])
    assert watched.taken == []
    assert watched.hits.counts == PrefixCounts()


def test_a_request_that_begins_again_has_no_hit_by_what_it_computed() -> None:
    watched = Watched(timed_request(1, 10, 2), timed_request(2, 10, 2))
    watched.plan(batch_of("r001", "r002"), borrowings=[reading("r002", 0)])
    watched.plan(batch_of("r001", "r002"), borrowings=[reading("r001", 0), reading("r002", 0, 1)])
    assert watched.taken == [CachedTokens("r002", 4)]
    assert watched.hits.counts == PrefixCounts(20, 4, {0: 12, 1: 4})


def test_a_prompt_counts_once_for_all_its_choices() -> None:
    request = replace(timed_request(1, 10, 2), num_choices=3)
    watched = Watched(request)
    watched.hits.on_event(RequestAborted(0.1, "r001"), Applied())
    watched.plan(batch_of("r001-1"), borrowings=[reading("r001-1", 0)])
    watched.plan(batch_of("r001-1", "r001-2"))
    assert watched.taken == [CachedTokens("r001-1", 4)]
    assert watched.hits.counts.num_asked == 10


def test_requests_that_end_first_or_do_not_use_the_cache_ask_for_nothing() -> None:
    off = replace(timed_request(1, 10, 2), uses_cache=False)
    scored = replace(timed_request(2, 10, 2), num_prompt_logprobs=0)
    watched = Watched(off, scored, timed_request(3, 10, 2), timed_request(4, 10, 2))
    watched.hits.on_event(RequestAborted(0.1, "r003"), Applied())
    watched.plan(failed="r004")
    watched.plan(batch_of("r001", "r002", "r003", "r004"))
    assert watched.hits.counts == PrefixCounts()


def served(requests: Sequence[Request], *incidents: Event) -> tuple[dict[str, int], PrefixCounts]:
    """Return the cached tokens of each request on one simulated instance, and all counts."""
    taken: list[CachedTokens] = []

    async def run() -> PrefixCounts:
        hits, model = PrefixHits(taken.append), WorkCostModel()
        state = ClusterState(instances_with([600]), keeps_prefixes=True)
        executor = SimulatedExecutor(model, requests, incidents)
        async for _ in Scheduling(
            state, make_policy("esp", PolicyConfig()), model, executor, (hits,)
        ).events():
            state.check()
        assert state.snapshot(0.0).stats.num_cached_tokens == sum(hits.counts.read_by_instance.values())
        return hits.counts

    counts = asyncio.run(run())
    return {cached.request_id: cached.num_tokens for cached in taken}, counts


def test_a_prompt_that_was_computed_is_read_by_the_next_request_of_the_same_salt() -> None:
    first, again, other, off = (timed_request(n, 100, 4, 10.0 * n) for n in range(4))
    other, off = replace(other, cache_salt="other"), replace(off, uses_cache=False)
    cached, counts = served([first, again, other, off])
    assert cached == {"r001": 99}
    assert (counts.num_asked, counts.num_hits) == (300, 99)


def test_after_a_reset_nothing_is_cached() -> None:
    requests = [timed_request(n, 100, 4, 10.0 * n) for n in range(3)]
    cached, _ = served(requests, PrefixCacheReset(15.0))
    assert cached == {"r001": 99}
