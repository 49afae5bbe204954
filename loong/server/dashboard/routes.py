"""The routes under `/dashboard`: the page and its files, the live feed, batches and requests."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from importlib.resources import files
from typing import TypeVar

import msgspec
from aiohttp import web

from loong.core.request import RequestId
from loong.observability.decision_log.story.index import LogIndex
from loong.observability.decision_log.story.story import story_of
from loong.observability.decision_log.story.words import chapters, heading
from loong.server.api.errors import ApiError
from loong.server.api.json_bodies import json_response
from loong.server.api.sse import EventStream
from loong.server.cluster import CLUSTER
from loong.server.dashboard.batches import BatchPart, BatchReport, report_of_batch
from loong.server.dashboard.feed import Feed
from loong.server.dashboard.past import PAST, Past, keep_past
from loong.server.dashboard.shared_feed import SharedFeed
from loong.server.dashboard.shared_index import SharedIndex
from loong.server.metrics.request_observers import RequestObservers

T = TypeVar("T")

_PARTS = {part.name: part for part in files("loong.server.dashboard").joinpath("page").iterdir()}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_FEED = web.AppKey("feed", SharedFeed)
_INDEX = web.AppKey("index", SharedIndex)


def add_dashboard(app: web.Application, request_observers: RequestObservers) -> None:
    """Prepare an application to serve `DASHBOARD_ROUTES`."""
    past = app[PAST] = Past(request_observers)
    app[_FEED] = SharedFeed(lambda: Feed(app[CLUSTER], request_observers, past))
    app[_INDEX] = SharedIndex(request_observers.recent)
    app.cleanup_ctx.append(keep_past)
    app.on_shutdown.append(_stop)


async def start(http: web.Request) -> web.Response:  # noqa: ARG001 (a handler takes a request)
    """Return the page at `/`, which links to all others."""
    return _file("start.html")


async def page(http: web.Request) -> web.Response:  # noqa: ARG001 (a handler takes a request)
    """Return the dashboard page."""
    return _file("index.html")


async def page_file(http: web.Request) -> web.Response:
    """Return a file of the page."""
    return _file(http.match_info["name"])


async def events(http: web.Request) -> web.StreamResponse:
    """Stream the state of the cluster while the page is open."""
    stream, feed = EventStream(http.app[CLUSTER].settings), http.app[_FEED]
    with feed.page():
        async with stream.open(http), aclosing(feed.events()) as found:
            async for event in found:
                await stream.send(event)
    return stream.response


async def batch(http: web.Request) -> web.Response:
    """Return a batch with its requests, its duration, and the reasons of its plan."""
    batch_id = int(http.match_info["batch_id"])
    story = await _reported(http, lambda index: report_of_batch(index, batch_id)) or _bare(http, batch_id)
    if story is None:
        raise ApiError(404, f"batch {batch_id} is not known any more", "batch_not_found")
    return json_response(msgspec.to_builtins(story))


async def request(http: web.Request) -> web.Response:
    """Return a request's history, as `loong explain` shows it."""
    request_id = http.match_info["request_id"]
    story = await _reported(http, lambda index: _story(index, request_id))
    if story is None:
        message = f"nothing is known of request {request_id!r}, or nothing any more"
        raise ApiError(404, message, "request_not_found")
    return json_response(story)


async def _reported(http: web.Request, report: Callable[[LogIndex], T]) -> T:
    """Return a report on the recent decisions, computed in a thread."""
    return await asyncio.to_thread(report, await http.app[_INDEX].get())


def _bare(http: web.Request, batch_id: int) -> BatchReport | None:
    """Return a batch from the history alone, because its decision is no longer kept."""
    for ended in reversed(http.app[CLUSTER].engine.history().batches):
        if ended.batch_id == batch_id:
            parts = [BatchPart(request_id, None, ended.phase) for request_id in ended.request_ids]
            seconds = ended.ended_at - ended.started_at
            group = ended.group.instance_ids
            return BatchReport(batch_id, ended.phase, group, 1, 1, None, seconds, parts, (), ended.holder_ids)
    return None


def _story(index: LogIndex, request_id: RequestId) -> dict[str, object] | None:
    if request_id not in index.arrivals:
        return None
    story = story_of(index, request_id)
    reported = [{"time": time, "sentences": list(sentences)} for time, sentences in chapters(story)]
    return {"id": request_id, "heading": list(heading(story)), "chapters": reported}


def _file(name: str) -> web.Response:
    part = _PARTS.get(name)  # never a path: a name may hold `../`
    content_type = _TYPES.get(name.rpartition(".")[2])
    if content_type is None or part is None:
        raise ApiError(404, f"the dashboard has no part {name!r}", "not_found")
    return web.Response(text=part.read_text(encoding="utf-8"), content_type=content_type, headers=_HEADERS)


async def _stop(app: web.Application) -> None:
    app[_FEED].stop()


DASHBOARD_ROUTES = (
    web.get("/", start),
    web.get("/dashboard", page),
    web.get("/dashboard/page/{name}", page_file),
    web.get("/dashboard/events", events, allow_head=False),  # its answer would not end
    web.get("/dashboard/batches/{batch_id:[0-9]{1,18}}", batch),
    web.get("/dashboard/requests/{request_id}", request),
)
