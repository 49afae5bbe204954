"""Bodies in and JSON out."""

import asyncio

import msgspec
from aiohttp import web

from loong.server.context import SERVER
from loong.server.errors import ApiError
from loong.server.schemas import Fields, parse


async def read_fields(http: web.Request, schema: type[Fields]) -> Fields:
    """Receive and check a body; raise a 408 if it does not come, a 400 if it is not what `schema` says."""
    seconds = http.app[SERVER].settings.body_timeout
    try:
        async with asyncio.timeout(seconds):
            body = await http.read()
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {seconds:g} s", "request_timeout") from error
    return parse(body, schema)


def json_response(content: object, status: int = 200) -> web.Response:
    """Answer with one JSON value."""
    body = msgspec.json.encode(content)
    return web.Response(body=body, status=status, content_type="application/json")
