"""A completions endpoint on a real socket that streams the bytes of a script."""

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

from aiohttp import web

Script: TypeAlias = Callable[[dict[str, Any], web.StreamResponse], Awaitable[None]]
"""Is given the request's JSON and a stream whose headers are sent."""


@contextlib.asynccontextmanager
async def serve_script(script: Script, path: str = "/v1/completions") -> AsyncIterator[str]:
    """Yield the base URL."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await script(body, response)
        return response

    app = web.Application(client_max_size=2**26)
    app.router.add_post(path, complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
