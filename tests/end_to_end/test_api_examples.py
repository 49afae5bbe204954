"""The commands of docs/api.md do what it says, on a real server."""

import json
import shlex
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from served import Served, served

from loong.server.reference.api_examples import ADDRESS, ADMIN_KEY, EXAMPLES, Example
from loong.server.reference.openapi import OPERATIONS

TRIED = [(method, path, example) for (method, path), examples in EXAMPLES.items() for example in examples]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("examples")
    flags = ("--num-instances", "1", "--kv-cache-tokens", "4096", "--trace-dir", "t")
    with served(directory, *flags, "--allow-fault-injection", "--admin-key", ADMIN_KEY) as running:
        yield running


def typed(command: str, url: str) -> httpx.Response:
    """Send what curl would send for a command line."""
    words = shlex.split(command.replace("\\\n", ""))
    assert words.pop(0) == "curl"
    method, headers, body = "GET", {}, None
    while words:
        match word := words.pop(0):
            case "-N":
                pass
            case "-X":
                method = words.pop(0)
            case "-H":
                name, _, value = words.pop(0).partition(": ")
                headers[name] = value
            case "-d":
                method, body = "POST", words.pop(0)
            case _:
                address = word.replace(ADDRESS, url)
    if address.endswith(("_profile", "_prefix_cache")):  # the server of this test has an admin key
        headers["Authorization"] = f"Bearer {ADMIN_KEY}"
    return httpx.request(method, address, headers=headers, content=body, timeout=60)


def parsed(text: str) -> list[Any]:
    """Return the JSON of an answer, or of each of its events."""
    if not text.startswith("data: "):
        return [json.loads(text)]
    events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    return [json.loads(event) for event in events if event != "[DONE]"]


def assert_has(reported: Any, shown: Any) -> None:
    """Check that the answer has the shown fields, by their names and kinds."""
    if isinstance(shown, dict):
        for name, value in shown.items():
            assert name in reported
            assert_has(reported[name], value)
    elif isinstance(shown, list):
        assert len(reported) == len(shown)
        for one, other in zip(reported, shown, strict=True):
            assert_has(one, other)
    else:
        assert type(reported) is type(shown)


def test_every_endpoint_has_an_example() -> None:
    assert set(EXAMPLES) == {(operation.method, operation.path) for operation in OPERATIONS}


@pytest.mark.parametrize(("method", "path", "example"), TRIED)
def test_an_example_is_answered_as_shown(server: Served, method: str, path: str, example: Example) -> None:
    response = typed(example.command(method, path), server.url)
    shown = parsed(example.answer) if example.answer else []
    assert response.status_code == (400 if shown and "error" in shown[0] else 200), response.text
    if shown:
        reported = parsed(response.text)
        assert len(reported) == len(shown)
        for one, other in zip(reported, shown, strict=True):
            assert_has(one, other)
        assert response.is_success or reported == shown
