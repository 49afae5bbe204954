from collections.abc import Mapping
from pathlib import Path

import pytest

from loong.launcher.bench import served as bench_served
from loong.launcher.bench import spawned_server
from loong.launcher.bench.config import BenchConfig
from loong.launcher.bench.spawned_server import ServerConfig
from loong.launcher.runs.chosen_load import Served

STUB_CAPACITY = 300.0
STUB = Path(__file__).with_name("stub_server.py")


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
    monkeypatch.setattr(
        spawned_server, "ENTRY", f"import runpy; runpy.run_path({str(STUB)!r}, run_name='__main__')"
    )
    monkeypatch.setattr(bench_served, "served_by_ours", _served_by_stubs)


def _served_by_stubs(servers: Mapping[str, ServerConfig], _: BenchConfig) -> Served:
    """Return the capacity of stubs with these arguments; they answer at once."""
    server = next(iter(servers.values()))
    words = iter(server.extra_arguments)
    found = [int(next(words)) for word in words if word == "--max-model-len"]
    return Served(found[0] if found else 1_000_000, lambda _: STUB_CAPACITY, "the test says stubs have")
