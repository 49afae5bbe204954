"""Answers of servers, parsed for tests."""

import json
from typing import Any

import httpx

JSON_TYPE = {"Content-Type": "application/json"}
NOTHING_CACHED = {"prompt_tokens_details": {"cached_tokens": 0}}


async def post(url: str, path: str, **body: object) -> httpx.Response:
    """Send one JSON body and wait for the whole answer."""
    async with httpx.AsyncClient(timeout=30) as client:
        return await client.post(url + path, json=body)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of a stream's events; fails unless `[DONE]` comes last, and once."""
    lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
    *events, last = [line.removeprefix("data: ") for line in lines]
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


async def error_of(url: str, path: str, status: int, **body: object) -> dict[str, Any]:
    """Send a body that is to be refused with `status`; return the error object."""
    response = await post(url, path, **body)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def get_json(url: str, path: str) -> Any:
    """Fetch one JSON value."""
    async with httpx.AsyncClient(timeout=30) as client:
        return (await client.get(url + path)).json()
