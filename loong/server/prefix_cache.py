"""`/reset_prefix_cache`, with vLLM's name: evicts cached KV."""

from aiohttp import web

from loong.server.answers.status import Status
from loong.server.api.json_bodies import json_response
from loong.server.cluster import CLUSTER


async def reset_prefix_cache(http: web.Request) -> web.Response:
    """Evict all KV that no request reads. Requests that come later find none of it."""
    http.app[CLUSTER].engine.reset_prefix_cache()
    return json_response(Status("reset"))
