"""Every answer has an `X-Request-Id`."""

import logging
from typing import Any

import httpx
import pytest
from http_answers import events_of
from listening import BESIDE_ITS_ENGINE
from scripted_engine import ScriptedEngine, Serving

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
ASKED: dict[str, dict[str, Any]] = {
    PATH: {"prompt": "a"},
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
}
ANSWERS = [  # method, path, body, status
    ("POST", PATH, {"prompt": "a"}, 200),
    ("POST", PATH, {"prompt": "a", "stream": True}, 200),
    ("POST", PATH, {}, 400),
    ("POST", PATH, {"prompt": "a", "max_tokens": 10_000}, 400),
    ("POST", PATH, {"prompt": "a" * 2000}, 413),
    ("POST", "/tokenize", {"prompt": "a"}, 200),
    ("GET", "/v1/models", None, 200),
    ("GET", "/health", None, 200),
    ("HEAD", "/health", None, 200),
    ("GET", "/metrics", None, 200),
    ("GET", "/trace", None, 200),
    ("POST", "/reset_prefix_cache", None, 200),
    ("POST", "/start_profile", None, 404),
    ("GET", "/nothing", None, 404),
    ("GET", PATH, None, 405),
]


async def ask(
    url: str, method: str, path: str, body: object = None, given: bytes | None = None
) -> httpx.Response:
    headers = [] if given is None else [(b"x-request-id", given)]
    async with httpx.AsyncClient(timeout=30) as client:
        return await client.request(method, url + path, json=body, headers=headers)


async def test_every_answer_has_an_id_of_its_own_or_its_clients(serving: Serving) -> None:
    ids = set()
    async with serving(ScriptedEngine(), max_body_bytes=1000) as url:
        for method, path, body, status in ANSWERS:
            own = await ask(url, method, path, body)
            clients = await ask(url, method, path, body, b"my id/7")
            assert own.status_code == clients.status_code == status, (own.text, path)
            assert clients.headers["X-Request-Id"] == "my id/7"
            ids.add(own.headers["X-Request-Id"])
    assert len(ids) == len(ANSWERS)


@BESIDE_ITS_ENGINE
async def test_a_refusal_for_want_of_a_key_has_an_id_too(serving: Serving) -> None:
    async with serving(ScriptedEngine(), api_keys=("key",)) as url:
        refused = await ask(url, "GET", "/v1/models", given=b"mine")
    assert (refused.status_code, refused.headers["X-Request-Id"]) == (401, "mine")


@pytest.mark.parametrize("path", ASKED)
async def test_a_completion_is_called_by_its_own_id(serving: Serving, path: str) -> None:
    async with serving(ScriptedEngine()) as url:
        whole = await ask(url, "POST", path, ASKED[path])
        stream = await ask(url, "POST", path, ASKED[path] | {"stream": True})
    assert whole.headers["X-Request-Id"] == whole.json()["id"]
    assert {event["id"] for event in events_of(stream)} == {stream.headers["X-Request-Id"]}


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("given", [b"", b"a" * 129, b"\xc3\xa9", b"a\tb"])
async def test_an_id_that_a_header_or_a_log_cannot_hold_is_not_reported_back(
    serving: Serving, given: bytes
) -> None:
    async with serving(ScriptedEngine()) as url:
        answer = await ask(url, "POST", PATH, {"prompt": "a"}, given)
        assert answer.headers["X-Request-Id"] == answer.json()["id"]
        assert (await ask(url, "GET", "/v1/models", given=given)).headers["X-Request-Id"].isalnum()
        longest = await ask(url, "GET", "/v1/models", given=b"a" * 128)
    assert longest.headers["X-Request-Id"] == "a" * 128


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_the_log_names_a_failed_request_as_its_client_does(
    serving: Serving, caplog: pytest.LogCaptureFixture, prompt: object
) -> None:
    async with serving(ScriptedEngine(fail_at=1)) as url:
        with caplog.at_level(logging.WARNING):
            await ask(url, "POST", PATH, {"prompt": prompt}, b"mine")
            own = await ask(url, "POST", PATH, {"prompt": prompt})
    first, *_, last = [line for line in caplog.messages if "failed after" in line]
    assert "X-Request-Id mine" in first
    assert own.headers["X-Request-Id"] in last
    assert "X-Request-Id" not in last
