"""Servers that answer at once, in the place of `loong serve`."""

from pathlib import Path

import pytest

from loong.runs import spawned_server

STUB = Path(__file__).with_name("stub_server.py")


def spawn_stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let spawned servers run the stub."""
    monkeypatch.setattr(
        spawned_server, "ENTRY", f"import runpy; runpy.run_path({str(STUB)!r}, run_name='__main__')"
    )
