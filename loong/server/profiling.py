"""`/start_profile` and `/stop_profile`, with vLLM's names: a trace of all workers."""

from aiohttp import web

from loong.engine.client import Tracing
from loong.server.answers.status import Status, TraceFile
from loong.server.api.errors import ApiError
from loong.server.api.json_bodies import json_response
from loong.server.cluster import CLUSTER


async def start_profile(http: web.Request) -> web.Response:
    """Start a trace, and answer once all workers trace."""
    await _tracing(http).start()
    return json_response(Status("tracing; POST /stop_profile ends it"))


async def stop_profile(http: web.Request) -> web.Response:
    """End the trace, and return the path of its file, which Perfetto opens."""
    return json_response(TraceFile(str(await _tracing(http).write())))


def _tracing(http: web.Request) -> Tracing:
    tracing = http.app[CLUSTER].tracing
    if tracing is None:
        raise ApiError(404, "the server was started without --trace-dir", "tracing_is_off")
    return tracing
