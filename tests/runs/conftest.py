from pathlib import Path

import pytest
from stub_servers import spawn_stubs


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets runs go where they do by default."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def stub_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets spawned servers run the stub where they would run `loong serve`."""
    spawn_stubs(monkeypatch)
