import socket

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loong.workloads.client.scrape import Scraper
from loong.workloads.errors import ServerUnusableError


@pytest.mark.parametrize(
    ("status", "hint"), [(401, "set LOONG_API_KEY to a key of it"), (404, "is this an OpenAI-style API")]
)
async def test_a_server_that_does_not_report_its_models_is_named_with_what_may_help(
    status: int, hint: str
) -> None:
    async def refuse(_request: web.Request) -> web.Response:
        return web.Response(status=status)

    app = web.Application()
    app.router.add_get("/v1/models", refuse)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        with pytest.raises(ServerUnusableError, match=rf"{url}/v1/models answers with HTTP {status}; {hint}"):
            await Scraper(url).served_model(None)


async def test_why_a_server_cannot_be_reached_is_reported_in_words() -> None:
    with socket.socket() as silent:  # it has its port, and does not listen
        silent.bind(("127.0.0.1", 0))
        url = "http://{}:{}".format(*silent.getsockname())
        with pytest.raises(ServerUnusableError, match=f"no server answers at {url}: Connection refused$"):
            await Scraper(url).served_model(None)
