import asyncio
import gc
from collections.abc import Iterator

import httpx
import pytest
from large_requests import LARGE_REQUESTS, request_bytes, send_and_wait, watched
from scripted_engine import ScriptedEngine, Serving

from loong.core.cluster_history import BatchSlice, ClusterHistory
from loong.core.cost.work import Phase
from loong.core.instance import ESPGroup
from loong.engine.client import EngineLimits

BIG = EngineLimits(max_model_len=2**24, max_request_kv=2**24, vocab_size=264)
MOST_IN_A_TURN = 0.2  # of a request's computation; `benchmarks/server/loop_stalls.py` bounds it in seconds


@pytest.fixture(autouse=True)
def _garbage_of_other_tests_is_not_looked_at() -> Iterator[None]:
    """Freeze the objects of other tests: a collection of them takes longer than any request."""
    gc.freeze()
    yield
    gc.unfreeze()


async def test_a_long_trace_does_not_hold_up_the_others(serving: Serving) -> None:
    group, kv = ESPGroup((0, 1, 2, 3)), tuple((i, 1000) for i in range(4))
    batches = [BatchSlice(i, group, Phase.DECODE, i, i + 1, ("a",) * 20, kv, kv) for i in range(10_000)]
    async with serving(ScriptedEngine(past=ClusterHistory(tuple(batches)))) as url, watched() as stalls:
        answer = await asyncio.to_thread(httpx.get, f"{url}/trace", timeout=60)
    assert answer.status_code == 200
    assert len(answer.content) > 10_000_000
    assert stalls.largest_share < MOST_IN_A_TURN


@pytest.mark.parametrize("name", LARGE_REQUESTS)
async def test_a_large_request_does_not_hold_up_the_others(serving: Serving, name: str) -> None:
    request = request_bytes(name)
    async with serving(ScriptedEngine(limits=BIG)) as url, watched() as stalls:
        assert await asyncio.to_thread(send_and_wait, url, request) == 200
    assert stalls.largest_share < MOST_IN_A_TURN
