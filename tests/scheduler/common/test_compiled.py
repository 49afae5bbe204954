from collections.abc import Callable
from pathlib import Path

import pytest
from numba.core.dispatcher import Dispatcher

from loong.scheduler.common.compiled import compiled

SOURCE = """
def double(x: float) -> float:
    return 2 * x
"""


def compiled_from(source: Path) -> "Dispatcher[Callable[[float], float]]":
    """Return a compiled function whose source is in that file."""
    source.write_text(SOURCE)
    names: dict[str, Callable[[float], float]] = {}
    exec(compile(SOURCE, str(source), "exec"), names)
    function = compiled(names["double"])
    assert isinstance(function, Dispatcher)
    return function


def test_nothing_is_compiled_before_the_first_call(tmp_path: Path) -> None:
    double = compiled_from(tmp_path / "doubled.py")
    assert not double.signatures
    assert double(2.0) == 4.0
    assert len(double.signatures) == 1


def test_the_code_is_kept_beside_its_source_and_used_again(tmp_path: Path) -> None:
    assert compiled_from(tmp_path / "doubled.py")(2.0) == 4.0
    assert list((tmp_path / "__pycache__").glob("doubled.*.nbc"))
    again = compiled_from(tmp_path / "doubled.py")
    assert again(2.0) == 4.0
    assert again.stats.cache_hits


def test_a_function_runs_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "__pycache__").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert compiled_from(tmp_path / "doubled.py")(2.0) == 4.0
