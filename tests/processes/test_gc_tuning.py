import gc
from collections.abc import Iterator
from weakref import ref

import pytest
from new_garbage import only_new_garbage

from loong.processes.gc_tuning import THRESHOLDS, tune_gc


class Cycle:
    """An object that only a look for garbage frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_garbage_in_cycles_is_still_found() -> None:
    tune_gc()
    found = ref(Cycle())
    kept = [[number] for number in range(2 * THRESHOLDS[0])]
    assert found() is None
    assert len(kept) == 2 * THRESHOLDS[0]


def test_what_lives_is_looked_at_rarely() -> None:
    tune_gc()
    with only_new_garbage():
        gc.collect()
        found = ref(Cycle())
        kept = [[number] for number in range(THRESHOLDS[0] // 2)]
        assert found() is not None
    assert len(kept) == THRESHOLDS[0] // 2
