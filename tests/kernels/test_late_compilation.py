"""Compilation while requests wait is logged."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from loong.kernels.late_compilation import warn_of_compilation


def _nothing(x) -> None:  # type: ignore[no-untyped-def]  # a kernel
    pass


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[None]:
    with triton.knobs.compilation.scope(), triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        yield


@pytest.mark.usefixtures("listening")
def test_a_kernel_that_is_compiled_or_loaded_late_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def compile_late() -> list[str]:
        caplog.clear()
        source = ASTSource(JITFunction(_nothing), {"x": "i32"}, {}, {})
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
        return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    warn_of_compilation()
    (compiled,), (loaded,) = compile_late(), compile_late()
    assert "kernel _nothing was compiled in" in compiled
    assert "kernel _nothing was loaded in" in loaded
