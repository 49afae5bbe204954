from collections.abc import Mapping
from pathlib import Path

import pytest
from stub_servers import spawn_stubs

from loong.launcher.bench import served as bench_served
from loong.launcher.bench.chosen_load import Served
from loong.launcher.bench.config import BenchConfig
from loong.runs.spawned_server import ServerConfig

STUB_CAPACITY = 300.0


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets commands write where they do by default."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def stub_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets embedded servers run the stub where they would run `loong serve`."""
    serve_stubs(monkeypatch)


def serve_stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stub in the place of `loong serve`."""
    spawn_stubs(monkeypatch)
    monkeypatch.setattr(bench_served, "served_by_ours", _served_by_stubs)


def _served_by_stubs(servers: Mapping[str, ServerConfig], _: BenchConfig) -> Served:
    """Return the capacity of stubs with these arguments; they answer at once."""
    server = next(iter(servers.values()))
    words = iter(server.extra_arguments)
    found = [int(next(words)) for word in words if word == "--max-model-len"]
    return Served(found[0] if found else 1_000_000, lambda _: STUB_CAPACITY, "the test says stubs have")
