"""`/admin/scale` and `/admin/instances` need the admin key, and say what will happen or why it cannot."""

import asyncio

import httpx
import pytest
from scripted_engine import ScriptedEngine, Serving

from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.snapshot import Snapshot

KEY = "operators-key"
TWO = Snapshot(0.0, tuple(ElasticInstance(i, 1, InstanceKind.FULL, 4096) for i in range(2)))


async def send(url: str, method: str, path: str, key: str | None, body: object) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(timeout=30) as client:
        return await client.request(method, url + path, headers=headers, json=body or None)


async def ask(url: str, method: str, path: str, key: str | None = KEY, **body: int) -> httpx.Response:
    """Send a request, mostly with the admin key."""
    return await send(url, method, path, key, body)


@pytest.mark.parametrize(("method", "path"), [("POST", "/admin/scale"), ("GET", "/admin/instances")])
async def test_without_an_admin_key_nothing_can_be_scaled(serving: Serving, method: str, path: str) -> None:
    async with serving(ScriptedEngine(cluster=TWO), api_keys=("users-key",)) as url:
        response = await ask(url, method, path, "users-key", num_instances=2)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "admin_is_off"
    assert "--admin-key" in response.json()["error"]["message"]


@pytest.mark.parametrize("key", [None, "users-key", "operators-ke", "operators-keys"])
@pytest.mark.parametrize(("method", "path"), [("POST", "/admin/scale"), ("GET", "/admin/instances")])
async def test_no_other_key_opens_them(serving: Serving, method: str, path: str, key: str | None) -> None:
    engine = ScriptedEngine(cluster=TWO)
    async with serving(engine, admin_key=KEY, api_keys=("users-key",)) as url:
        response = await ask(url, method, path, key, num_instances=2)
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_admin_key")
    assert not engine.asked


@pytest.mark.parametrize(("method", "path"), [("POST", "/admin/scale"), ("GET", "/admin/instances")])
async def test_the_only_engine_is_engine_0(serving: Serving, method: str, path: str) -> None:
    engine = ScriptedEngine(cluster=TWO)
    async with serving(engine, admin_key=KEY) as url:
        refused = await ask(url, method, f"{path}?engine=1", num_instances=2)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "engine")
        assert "'1': this server has one, 0" in refused.json()["error"]["message"]
        assert not engine.asked
        assert (await ask(url, method, f"{path}?engine=0", num_instances=2)).status_code == 200


async def test_the_admin_key_is_no_key_of_users(serving: Serving) -> None:
    async with serving(ScriptedEngine(), admin_key=KEY, api_keys=("users-key",)) as url:
        assert (await ask(url, "GET", "/v1/models")).status_code == 401


async def test_a_change_is_answered_at_once_with_its_beginning(serving: Serving) -> None:
    engine = ScriptedEngine(cluster=TWO)
    async with serving(engine, admin_key=KEY) as url:
        before = (await ask(url, "GET", "/admin/instances")).json()
        changing = await ask(url, "POST", "/admin/scale", num_instances=3)
    assert before == {
        "num_instances": 2,
        "max_instances": 4,
        "memory_instances": 0,
        "is_done": True,
        "instances": [
            {"id": i, "state": "serving", "kv_used": 0, "kv_capacity": 4096, "kind": "full"} for i in range(2)
        ],
    }
    assert engine.asked == [3]
    assert (changing.json()["num_instances"], changing.json()["is_done"]) == (3, False)
    assert [instance["state"] for instance in changing.json()["instances"]] == ["serving"] * 2 + ["starting"]


async def test_with_wait_the_answer_comes_when_the_change_is_done(serving: Serving) -> None:
    engine = ScriptedEngine(cluster=TWO)
    async with serving(engine, admin_key=KEY) as url:
        waiting = asyncio.create_task(ask(url, "POST", "/admin/scale?wait=true", num_instances=2))
        await engine.paused.wait()
        assert not waiting.done()
        engine.resume.set()
        assert (await waiting).json()["is_done"]


async def test_a_change_that_a_later_one_replaces_is_a_conflict(serving: Serving) -> None:
    engine = ScriptedEngine(cluster=TWO)
    async with serving(engine, admin_key=KEY) as url:
        waiting = asyncio.create_task(ask(url, "POST", "/admin/scale?wait=1", num_instances=4))
        await engine.paused.wait()
        engine.asked.append(2)
        engine.resume.set()
        response = await waiting
    assert (response.status_code, response.json()["error"]["code"]) == (409, "scaled_again")


@pytest.mark.parametrize(
    ("query", "body", "status", "code", "param"),
    [
        ("", {"num_instances": 5}, 400, "invalid_value", "num_instances"),
        ("", {"num_instances": 0}, 400, "invalid_value", "num_instances"),
        ("", {"num_instances": "many"}, 400, "invalid_value", "num_instances"),
        ("", {"num_instances": 2, "instances": 2}, 400, "unsupported_parameter", "instances"),
        ("?wait=maybe", {"num_instances": 2}, 400, "invalid_value", "wait"),
        ("", {"num_instances": 1}, 409, "request_too_large", None),
    ],
)
async def test_other_numbers_are_refused_with_the_reason(
    serving: Serving, query: str, body: dict[str, object], status: int, code: str, param: str | None
) -> None:
    engine = ScriptedEngine(cluster=TWO)
    async with serving(engine, admin_key=KEY) as url:
        response = await send(url, "POST", f"/admin/scale{query}", KEY, body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert not engine.asked
