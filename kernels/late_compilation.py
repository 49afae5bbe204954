"""Warnings of kernels that are compiled while requests wait, which the warm-up should prevent."""

import logging
from collections.abc import Mapping
from typing import Any

import triton

logger = logging.getLogger(__name__)
_MICROSECOND = 1e-6


def warn_of_compilation() -> None:
    """Log every kernel that this process compiles from now on, or loads from Triton's cache."""
    triton.knobs.compilation.listener = _warn


def _warn(
    *,
    src: Any,
    metadata: Mapping[str, Any],
    times: triton.knobs.CompileTimes,
    cache_hit: bool,
    **_: object,
) -> None:
    """See `triton.knobs.CompilationListener`."""
    what = "loaded" if cache_hit else "compiled"
    seconds = times.total * _MICROSECOND
    logger.warning("kernel %s was %s in %.2f s while requests waited", metadata["name"], what, seconds)
    logger.debug("its signature is %s, and its constants are %s", dict(src.signature), dict(src.constants))
