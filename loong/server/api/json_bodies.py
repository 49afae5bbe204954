"""JSON in request bodies and responses."""

import asyncio

import msgspec
from aiohttp import web

from loong.server.api.errors import bad_request
from loong.server.api.parsing import Fields, check, read_json
from loong.server.context import SERVER

_LARGE_BODY = 2**18  # bytes; shorter bodies are read in one or two milliseconds
MAX_PARTS = 2**17  # of a body
MAX_VALUES = 2**23


async def read_fields(http: web.Request, schema: type[Fields]) -> Fields:
    """Receive and check a body, a large one in a thread. Raises the errors of `Bodies`, or a 400."""
    async with http.app[SERVER].bodies.receive(http) as body:
        if len(body) < _LARGE_BODY:
            return check(read_json(body), schema)
        return await asyncio.to_thread(lambda: check(read_large_json(body), schema))


def read_large_json(body: bytes) -> object:
    """Return the value of a body. Raises a 400 if it is not JSON, or has too many values to make them all."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # so that strings end at quotation marks
    between = plain.split(b'"', 4 * MAX_PARTS)[::2]
    num_parts = len(between) // 2 + sum(text.count(b"[") + text.count(b"{") for text in between)
    if num_parts > MAX_PARTS or sum(text.count(b",") for text in between) > MAX_VALUES:
        message = (
            f"the body has more than {MAX_PARTS} lists, objects and pairs of texts, or {MAX_VALUES} values"
        )
        raise bad_request(message, None, "too_many_values")
    return read_json(body)


def json_response(content: object, status: int = 200) -> web.Response:
    """Return a response with one JSON value."""
    body = msgspec.json.encode(content)
    return web.Response(body=body, status=status, content_type="application/json")
