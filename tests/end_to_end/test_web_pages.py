"""A server on loopback and the pages that are open in a browser on its machine."""

from collections.abc import Iterator

import httpx
import pytest
from served import Served, served

PAGE = "http://page.example"
FLAGS = ("--num-instances", "1", "--api-server-count", "2", "--allowed-origins", PAGE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("pages"), *FLAGS) as running:
        yield running


def status(server: Served, **headers: str) -> int:
    body = {"prompt": "a", "max_tokens": 1}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=30).status_code


def test_only_named_pages_use_a_server_whose_clients_are_answered_by_other_processes(server: Served) -> None:
    for _ in range(8):  # connections, which the system spreads over the processes
        assert status(server) == status(server, Origin=PAGE) == status(server, Origin=server.url) == 200
        assert status(server, Origin="http://other.example") == status(server, Origin="null") == 403
        assert status(server, Host="page.example") == 200
        assert status(server, Host="other.example") == 403
