import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import pytest
from aiohttp import web

Body: TypeAlias = dict[str, Any]
Script: TypeAlias = Callable[[Body, web.StreamResponse], Awaitable[None]]
ServeScript: TypeAlias = Callable[[Script], contextlib.AbstractAsyncContextManager[str]]


@pytest.fixture
def serve_script() -> ServeScript:
    """A completions endpoint on a real socket that streams whatever the script writes."""

    @contextlib.asynccontextmanager
    async def serve(script: Script) -> AsyncIterator[str]:
        async def complete(request: web.Request) -> web.StreamResponse:
            body = json.loads(await request.read())
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await script(body, response)
            return response

        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/completions", complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        try:
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()

    return serve
