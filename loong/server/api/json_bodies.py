"""JSON in request bodies and responses."""

import asyncio

import msgspec
from aiohttp import web

from loong.server.api.large_json import LARGE_BODY, read_large_json
from loong.server.api.parsing import Fields, check, read_json
from loong.server.context import SERVER


async def read_fields(http: web.Request, schema: type[Fields]) -> Fields:
    """Receive and check a body, a large one in a thread. Raises the errors of `Bodies`, or a 400."""
    async with http.app[SERVER].bodies.receive(http) as body:
        if len(body) < LARGE_BODY:
            return check(read_json(body), schema)
        return await asyncio.to_thread(lambda: check(read_large_json(body), schema))


def json_response(content: object, status: int = 200) -> web.Response:
    """Return a response with one JSON value."""
    body = msgspec.json.encode(content)
    return web.Response(body=body, status=status, content_type="application/json")
