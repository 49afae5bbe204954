"""The client of servers reports in words why a request had no answer, with asyncio and without it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loong.core.errors import ConfigError
from loong.http_client import BrokenOffError, HTTPClient, Page, RefusedError, UnreachableError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/page", handler)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def both(client: HTTPClient, method: str, body: object = None) -> list[Page]:
    return [
        await client.ask_async(method, "/page", body),
        await asyncio.to_thread(client.ask, method, "/page", body),
    ]


def streamed(client: HTTPClient) -> bytes:
    with client.stream("/page", {}) as parts:
        return b"".join(parts)


async def echo(request: web.Request) -> web.Response:
    key = request.headers.get("Authorization", "no key")
    return web.Response(text=f"{request.method} {key} {await request.text()}")


async def test_a_request_has_its_key_and_its_body_as_json() -> None:
    async with served(echo) as url:
        pages = await both(HTTPClient(url, "k"), "POST", {"n": 1})
        assert pages == [Page(200, b'POST Bearer k {"n":1}')] * 2
        assert await both(HTTPClient(f"{url}/v1"), "GET") == [Page(200, b"GET no key ")] * 2
        assert await asyncio.to_thread(streamed, HTTPClient(url)) == b"POST no key {}"


async def test_a_redirect_is_followed() -> None:
    async def redirect(_: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect(target)

    async with served(echo) as url:
        target = f"{url}/page"
        async with served(redirect) as elsewhere:
            assert await both(HTTPClient(elsewhere), "GET") == [Page(200, b"GET no key ")] * 2


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"error": {"message": "too busy", "code": "busy"}}', "too busy"),
        ('{"error": "too busy"}', "the server answers with status 503"),
        ("<html>", "the server answers with status 503"),
        ("[" * 100_000, "the server answers with status 503"),
        ("", "the server answers with status 503"),
    ],
)
async def test_a_refusal_gives_the_servers_reason_or_its_status(body: str, reason: str) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=503, text=body)

    async with served(refuse) as url:
        client = HTTPClient(url)
        assert [(page.is_ok, page.reason) for page in await both(client, "GET")] == [(False, reason)] * 2
        with pytest.raises(RefusedError, match=rf"^{reason}$") as refused:
            await asyncio.to_thread(streamed, client)
        assert refused.value.status == 503


async def test_a_server_that_is_not_there_is_unreachable_in_the_systems_words() -> None:
    with socket.socket() as silent:  # it has its port, and does not listen
        silent.bind(("127.0.0.1", 0))
        client = HTTPClient("http://{}:{}".format(*silent.getsockname()))
        with pytest.raises(UnreachableError, match=r"^Connection refused$"):
            await client.ask_async("GET", "/page")
        for ask in (lambda: client.ask("GET", "/page"), lambda: streamed(client)):
            with pytest.raises(UnreachableError, match=r"^Connection refused$"):
                ask()


async def test_a_server_that_never_answers_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = HTTPClient("http://{}:{}".format(*silent.getsockname()), timeout=0.1)
        with pytest.raises(UnreachableError, match=r"^/page took more than 0\.1 s$"):
            await client.ask_async("GET", "/page")
        for ask in (lambda: client.ask("GET", "/page"), lambda: streamed(client)):
            with pytest.raises(UnreachableError, match=r"^timed out$"):
                ask()


@pytest.mark.parametrize("is_chunked", [True, False])
async def test_a_stream_that_ends_in_the_middle_is_broken_off(is_chunked: bool) -> None:
    async def break_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if not is_chunked:
            response.content_length = 100
        await response.prepare(request)
        await response.write(b"well")
        assert request.transport is not None
        request.transport.abort()
        return response

    async with served(break_off) as url:
        with pytest.raises(BrokenOffError, match=r"^the server hung up$"):
            await asyncio.to_thread(streamed, HTTPClient(url))


async def test_a_stream_that_stands_still_is_broken_off() -> None:
    is_over = asyncio.Event()

    async def stand_still(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"well")
        await is_over.wait()
        return response

    async with served(stand_still) as url:
        with pytest.raises(BrokenOffError, match=r"^timed out$"):
            await asyncio.to_thread(streamed, HTTPClient(url, timeout=0.5))
        is_over.set()


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "http://localhost:99999", "ftp://localhost"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL such as"):
        HTTPClient(url)
