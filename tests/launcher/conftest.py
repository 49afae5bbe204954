from pathlib import Path

import pytest

from loong.launcher import embedded

STUB = Path(__file__).with_name("stub_server.py")


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets commands write where they do by default."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def stub_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets embedded servers run the stub where they would run `loong serve`."""
    monkeypatch.setattr(
        embedded, "ENTRY", f"import runpy; runpy.run_path({str(STUB)!r}, run_name='__main__')"
    )
