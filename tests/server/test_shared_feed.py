"""Many readers of the dashboard cost as much as few, and slow ones are bounded."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

import httpx
import pytest
from http_answers import get_json
from raw_http import raw_connection
from scripted_engine import ScriptedEngine, Serving

from loong.core.cluster_history import BatchSlice, ClusterHistory
from loong.core.cost.work import Phase
from loong.core.instance import ESPGroup
from loong.core.snapshot import Snapshot
from loong.observability.decision_log.recent import RecentLines
from loong.observability.decision_log.runs import RequestRuns
from loong.server.cluster import MAX_UNREAD_TRACES
from loong.server.cluster_app import cluster_of
from loong.server.dashboard import shared_feed
from loong.server.dashboard.feed import Feed
from loong.server.dashboard.past import Past
from loong.server.dashboard.shared_feed import MAX_LATE_TICKS, SharedFeed
from loong.server.dashboard.shared_index import SharedIndex
from loong.server.metrics.request_observers import RequestObservers, Targets
from loong.server.settings import ServerSettings

EVENTS = b"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\n\r\n"


def observers() -> RequestObservers:
    return RequestObservers("esp", RecentLines(), RequestRuns(), dict, lambda _: Targets(1.0, 0.5))


class Story:
    """An engine that ends one batch after the other, and the shared feed of its pages."""

    def __init__(self) -> None:
        self.num_made = 0  # ticks, of all feeds
        self.num_batches = 0
        self._engine, self._observers = ScriptedEngine(), observers()
        self._cluster = cluster_of(self._engine, ServerSettings("tiny"), None, self._observers)
        self._past = Past(self._observers)
        self.feed = SharedFeed(self._new_feed)
        self.end_a_batch()

    def end_a_batch(self) -> None:
        self.num_batches += 1
        batches = tuple(
            BatchSlice(i, ESPGroup((0,)), Phase.DECODE, i - 1.0, float(i), ("r",), ())
            for i in range(1, self.num_batches + 1)
        )
        self._engine.past = ClusterHistory(batches)
        self._engine.cluster = Snapshot(float(self.num_batches), ())

    def _new_feed(self) -> Feed:
        story = self

        class CountedFeed(Feed):
            def tick(self):  # type: ignore[no-untyped-def]
                story.num_made += 1
                return super().tick()

        return CountedFeed(self._cluster, self._observers, self._past)


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> Story:
    """Make a tick whenever a page asks for one."""
    monkeypatch.setattr(shared_feed, "TICK_SECONDS", 0.0)
    return Story()


def batches_of(event: bytes) -> list[int]:
    return [batch["id"] for batch in json.loads(event.removeprefix(b"data: "))["ended"]]


async def opened(story: Story, stack: AsyncExitStack) -> AsyncGenerator[bytes]:
    """Open a page, which has read its hello."""
    stack.enter_context(story.feed.page())
    page = await stack.enter_async_context(aclosing(story.feed.events()))
    assert b'"policy":"esp"' in await anext(page)
    return page


async def test_a_tick_is_made_once_for_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_feed, "TICK_SECONDS", 0.05)
    story = Story()

    async def read(page: AsyncGenerator[bytes]) -> list[bytes]:
        return [await anext(page) for _ in range(4)]

    async with AsyncExitStack() as stack:
        pages = [await opened(story, stack) for _ in range(200)]
        read_events = await asyncio.gather(*map(read, pages))
        assert len({id(event) for events in read_events for event in events}) <= story.num_made
        assert story.num_made <= 2 * story.feed._num_ticks


async def test_pages_that_open_at_any_time_see_every_batch_once(story: Story) -> None:
    async with AsyncExitStack() as stack:
        seen: dict[int, list[int]] = {}
        pages: list[AsyncGenerator[bytes]] = []
        for number in range(12):
            if number % 3 == 0:
                pages.append(await opened(story, stack))
            for index, page in enumerate(pages):
                if index != number % 4:  # now and then one is late
                    seen.setdefault(index, []).extend(batches_of(await anext(page)))
            story.end_a_batch()
        for index, page in enumerate(pages):
            while story.num_batches not in seen[index]:
                seen[index] += batches_of(await anext(page))
        for found in seen.values():
            assert sorted(found) == list(range(1, story.num_batches + 1))


async def test_a_page_that_is_too_far_behind_ends_and_begins_anew(story: Story) -> None:
    async with AsyncExitStack() as stack:
        slow, quick = [await opened(story, stack) for _ in range(2)]
        await anext(slow)
        for _ in range(MAX_LATE_TICKS + 2):
            await anext(quick)
        with pytest.raises(StopAsyncIteration):
            await anext(slow)
        assert len(story.feed._ticks) == MAX_LATE_TICKS


async def test_nothing_is_kept_for_pages_when_none_is_open(story: Story) -> None:
    async with AsyncExitStack() as stack:
        page = await opened(story, stack)
        for _ in range(5):
            await anext(page)
    assert not story.feed._ticks


async def test_more_pages_than_may_be_are_refused(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_feed, "MAX_PAGES", 2)
    async with (
        serving(ScriptedEngine(), observers()) as url,
        httpx.AsyncClient(timeout=30) as client,
        AsyncExitStack() as stack,
    ):
        pages = [await stack.enter_async_context(raw_connection(url)) for _ in range(2)]
        for page in pages:
            await page.send(EVENTS)
            assert await page.status() == 200
        refused = await client.get(f"{url}/dashboard/events")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_pages")
        pages[0].writer.transport.abort()
        status = 503
        while status == 503:  # until the server has seen it leave
            async with client.stream("GET", f"{url}/dashboard/events") as answer:
                status = answer.status_code
        assert status == 200


async def test_reports_that_wait_share_an_index() -> None:
    class CountedLines(RecentLines):
        num_read = 0

        def written(self) -> tuple[bytes, ...]:
            self.num_read += 1
            return super().written()

    lines = CountedLines()
    index = SharedIndex(lines)
    found = await asyncio.gather(*(index.get() for _ in range(50)))
    assert lines.num_read == 2  # the first was begun before the others asked
    assert len(set(map(id, found))) == 2
    leaving = asyncio.create_task(index.get())
    await asyncio.sleep(0)
    staying = asyncio.create_task(index.get())
    leaving.cancel()
    assert id(await staying) not in set(map(id, found))
    assert index._index is None


async def test_traces_that_nobody_reads_are_bounded(serving: Serving) -> None:
    group, kv = ESPGroup((0, 1, 2, 3)), tuple((i, 1000) for i in range(4))
    batches = [BatchSlice(i, group, Phase.DECODE, i, i + 1, ("a",) * 20, kv, kv) for i in range(10_000)]
    async with (
        serving(ScriptedEngine(past=ClusterHistory(tuple(batches)))) as url,
        httpx.AsyncClient(timeout=60) as client,
        AsyncExitStack() as stack,
    ):
        readers = [
            await stack.enter_async_context(raw_connection(url, limit=1024)) for _ in range(MAX_UNREAD_TRACES)
        ]
        for reader in readers:
            await reader.send(b"GET /trace HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert await reader.status() == 200
        refused = await client.get(f"{url}/trace")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_traces")
        assert (await get_json(url, "/health"))["status"] == "ok"
        readers[0].writer.transport.abort()
        status = 503
        while status == 503:
            status = (await client.get(f"{url}/trace")).status_code
        assert status == 200


async def test_a_trace_that_nobody_reads_is_given_up(serving: Serving) -> None:
    group, kv = ESPGroup((0, 1, 2, 3)), tuple((i, 1000) for i in range(4))
    batches = [BatchSlice(i, group, Phase.DECODE, i, i + 1, ("a",) * 20, kv, kv) for i in range(10_000)]
    engine = ScriptedEngine(past=ClusterHistory(tuple(batches)))
    async with serving(engine, write_timeout=0.2) as url, AsyncExitStack() as stack:
        for _ in range(MAX_UNREAD_TRACES + 1):
            reader = await stack.enter_async_context(raw_connection(url, limit=1024))
            status = 503
            while status == 503:
                await reader.send(b"GET /trace HTTP/1.1\r\nHost: localhost\r\n\r\n")
                status = await reader.status()
                if status == 503:
                    reader = await stack.enter_async_context(raw_connection(url, limit=1024))
            assert status == 200
