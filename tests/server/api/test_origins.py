"""Browser pages that may use the server, and bodies that a page can send without a preflight."""

from socket import gethostname

import httpx
import pytest
from listening import ANY_ADDRESS, BESIDE_ITS_ENGINE
from raw_http import raw_connection
from scripted_engine import ScriptedEngine, Serving

from loong.core.errors import ConfigError
from loong.server.settings import ServerSettings

PATH = "/v1/completions"
BODIES = {
    PATH: {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}
ROUTES = [
    *(("POST", path) for path in BODIES),
    ("POST", "/ping"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
    ("GET", "/dashboard"),
    ("GET", "/dashboard/events"),
    ("GET", "/health"),
    ("GET", "/trace"),
    ("GET", "/v1/models"),
    ("GET", "/nothing"),
    ("OPTIONS", PATH),
]
PAGE = "http://page.example"


async def ask(url: str, method: str = "POST", path: str = PATH, **headers: str | None) -> httpx.Response:
    """Send a request with these headers, `_` for `-` in their names; None: without that header."""
    async with httpx.AsyncClient(timeout=30) as client:
        request = client.build_request(method, url + path, json=BODIES.get(path))
        sent = httpx.Headers(request.headers.raw, encoding="latin-1")
        for name, value in headers.items():
            sent.pop(name.replace("_", "-"), None)
            if value is not None:
                sent[name.replace("_", "-")] = value
        request.headers = sent
        return await client.send(request)


def assert_refused(response: httpx.Response, code: str, named: str) -> None:
    assert response.status_code == 403, response.text
    error = response.json()["error"]
    assert error["code"] == code
    assert named in error["message"]


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("path", BODIES)
async def test_a_body_that_is_not_said_to_be_json_is_refused(serving: Serving, path: str) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        for sent in (None, "text/plain", "text/plain; application/json", "multipart/form-data", "", "\xff"):
            response = await ask(url, path=path, Content_Type=sent)
            assert response.status_code == 415, sent
            error = response.json()["error"]
            assert error["code"] == "unsupported_media_type"
            assert "application/json" in error["message"]
    assert not engine.requests


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    "media_type",
    ["application/json; charset=utf-8", "Application/JSON;charset=latin-1", "application/vnd.api+json; a=b"],
)
async def test_json_is_json_by_any_of_its_names(serving: Serving, media_type: str) -> None:
    async with serving(ScriptedEngine()) as url:
        assert (await ask(url, Content_Type=media_type)).status_code == 200


@pytest.mark.parametrize("origin", [PAGE, "null", "http://localhost:1", "http://127.0.0.1", "\xff"])
async def test_a_page_of_a_foreign_origin_is_refused_everywhere(serving: Serving, origin: str) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        for method, path in ROUTES:
            response = await ask(url, method, path, Origin=origin)
            assert_refused(response, "origin_not_allowed", "--allowed-origins")
            assert "Access-Control-Allow-Origin" not in response.headers
    assert not engine.requests


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_page_that_loads_an_address_as_an_image_is_refused(serving: Serving, site: str) -> None:
    async with serving(ScriptedEngine()) as url:
        loaded = await ask(url, "GET", "/trace", Sec_Fetch_Site=site, Sec_Fetch_Dest="image")
        assert_refused(loaded, "origin_not_allowed", "another site")
        followed = await ask(url, "GET", "/health", Sec_Fetch_Site=site, Sec_Fetch_Dest="document")
        assert followed.status_code == 200


@BESIDE_ITS_ENGINE
async def test_the_servers_own_pages_and_clients_that_are_no_pages_pass(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url:
        host = url.replace("http://127.0.0.1", "localhost")
        for headers in (
            {},
            {"Origin": url},
            {"Sec-Fetch-Site": "same-origin"},
            {"Sec-Fetch-Site": "none"},
            {"Origin": f"http://{host}", "Host": host},
            {"Origin": f"https://{host}", "Host": host},  # a proxy ends TLS
        ):
            assert (await ask(url, **headers)).status_code == 200, headers
        async with raw_connection(url) as connection:
            await connection.send(b"GET /health HTTP/1.0\r\n\r\n")  # without a Host
            assert await connection.status() == 200


async def test_an_allowed_page_asks_beforehand_and_reads_answers_and_errors(serving: Serving) -> None:
    key = "Bearer k"
    async with serving(ScriptedEngine(), allowed_origins=(PAGE, "app://page"), api_keys=("k",)) as url:
        asked, foreign = [
            await ask(
                url,
                "OPTIONS",
                Origin=origin,
                Access_Control_Request_Method="POST",
                Access_Control_Request_Headers="authorization,content-type",
            )
            for origin in (PAGE, "http://other.example")
        ]
        answered = await ask(url, Origin=PAGE, Authorization=key)
        refused = await ask(url, Origin=PAGE)
        missing = await ask(url, "GET", "/nothing", Origin="app://page", Authorization=key)
    assert asked.headers["Access-Control-Allow-Headers"] == "*, Authorization"
    assert "POST" in asked.headers["Access-Control-Allow-Methods"]
    assert [r.status_code for r in (asked, answered, refused, missing)] == [204, 200, 401, 404]
    for response in (asked, answered, refused):
        assert response.headers["Access-Control-Allow-Origin"] == PAGE
        assert response.headers["Vary"] == "Origin"
    assert missing.headers["Access-Control-Allow-Origin"] == "app://page"
    assert_refused(foreign, "origin_not_allowed", "other.example")
    assert "Access-Control-Allow-Origin" not in foreign.headers


async def test_an_allowed_page_reads_streams(serving: Serving) -> None:
    async with (
        serving(ScriptedEngine(), allowed_origins=(PAGE,)) as url,
        httpx.AsyncClient(timeout=30) as client,
    ):
        body = {"prompt": "a", "stream": True}
        response = await client.post(url + PATH, json=body, headers={"Origin": PAGE})
    assert response.text.endswith("data: [DONE]\n\n")
    assert response.headers["Access-Control-Allow-Origin"] == PAGE


@BESIDE_ITS_ENGINE
async def test_a_star_allows_pages_of_any_origin_and_host(serving: Serving) -> None:
    async with serving(ScriptedEngine(), allowed_origins=("*",)) as url:
        for headers in ({"Origin": PAGE}, {"Origin": "null"}, {"Host": "page.example"}, {}):
            response = await ask(url, **headers)
            assert response.status_code == 200
            assert response.headers["Access-Control-Allow-Origin"] == "*"


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    "host",
    [
        "page.example",
        "page.example:80",
        "localhost.page.example",
        "127.0.0.1.page.example",
        "192.168.0.1",
        "localhost@page.example",
        "[::2]:80",
        "",
        "\xff",
    ],
)
async def test_a_foreign_name_of_a_server_of_this_machine_alone_is_refused(
    serving: Serving, host: str
) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        for method, path in ROUTES:
            response = await ask(url, method, path, Host=host, Origin=f"http://{host}")
            assert_refused(response, "host_not_allowed", "--allowed-origins")
    assert not engine.requests


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1:1", "127.9.9.9", "[::1]", "[::1]:8000"]
)
async def test_this_machines_own_names_pass(serving: Serving, host: str) -> None:
    async with serving(ScriptedEngine()) as url:
        assert (await ask(url, Host=host)).status_code == 200


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    "host", ["page.example", "page.example:80", "127.0.0.1.page.example", "localhost.", "ai.", "", "\xff"]
)
async def test_a_foreign_name_of_a_server_for_others_without_a_key_is_refused(
    serving: Serving, host: str
) -> None:
    engine = ScriptedEngine()
    async with serving(engine, host=ANY_ADDRESS) as url:
        for method, path in ROUTES:
            response = await ask(url, method, path, Host=host, Origin=f"http://{host}")
            assert_refused(response, "host_not_allowed", "--allowed-origins")
    assert not engine.requests


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    "host", ["localhost:80", "192.168.0.1", "10.0.0.1:8000", "[::2]:80", "gpu-7:8000", "0.0.0.0", None]
)
async def test_addresses_and_names_of_local_hosts_pass_on_a_server_for_others(
    serving: Serving, host: str | None
) -> None:
    async with serving(ScriptedEngine(), host=ANY_ADDRESS) as url:
        assert (await ask(url, Host=gethostname() if host is None else host)).status_code == 200


@BESIDE_ITS_ENGINE
async def test_a_server_for_others_with_a_key_passes_any_host(serving: Serving) -> None:
    async with serving(ScriptedEngine(), host=ANY_ADDRESS, api_keys=("k",)) as url:
        assert (await ask(url, Host="page.example", Authorization="Bearer k")).status_code == 200


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    "settings",
    [{"api_keys": ("k",)}, {"host": "Page.example"}, {"allowed_origins": (PAGE,)}],
    ids=["with a key", "named by --host", "of an allowed page"],
)
async def test_names_that_the_operator_gives_pass(serving: Serving, settings: dict[str, object]) -> None:
    async with serving(ScriptedEngine(), **settings) as url:
        response = await ask(url, Host="page.example:8000", Authorization="Bearer k")
    assert response.status_code == 200


@pytest.mark.parametrize(
    "origin",
    ["", "null", "page.example", "http://page.example/", "http://*.example", "http://a b", "HTTP://A"],
)
def test_what_is_no_origin_is_refused_by_name(origin: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origins") as refusal:
        ServerSettings("tiny", allowed_origins=(origin,))
    assert repr(origin) in str(refusal.value)
