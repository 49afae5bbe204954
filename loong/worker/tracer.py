"""Traces of a worker: its threads and its device, with named ranges for the steps of the design."""

from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeAlias, TypeVar

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

P = ParamSpec("P")
T = TypeVar("T")

Span: TypeAlias = tuple[object, str, str]  # an object or class, its method, and its name in a trace


class Tracer:
    """Traces the process and its device. Before and after a trace it costs nothing.

    The methods in `spans` show as ranges of those names, for NVIDIA's tools as well (NVTX).
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self._spans = tuple(spans)
        self._profile: profile | None = None
        self._replaced: list[tuple[object, str, object]] = []

    def start(self) -> None:
        """Begin; a trace that was begun and not ended is dropped."""
        self.end(None)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        config = _ExperimentalConfig(profile_all_threads=True)  # those that serve, and that move KV
        started = profile(activities=activities, experimental_config=config)
        started.start()
        self._profile = started
        for owner, method, name in self._spans:
            self._replaced.append((owner, method, vars(owner).get(method)))
            setattr(owner, method, _named(getattr(owner, method), name))

    def end(self, path: Path | None) -> None:
        """End, and write a Chrome trace, if a path is given; an empty one if none was begun."""
        ended, self._profile = self._profile, None
        if ended is not None:
            while self._replaced:
                owner, method, before = self._replaced.pop()
                if before is None:
                    delattr(owner, method)  # what `start` set; the class's own is there again
                else:
                    setattr(owner, method, before)
            ended.stop()
        if path is not None and ended is not None:
            ended.export_chrome_trace(str(path))
        elif path is not None:
            path.write_text('{"traceEvents": []}')


def _named(call: Callable[P, T], name: str) -> Callable[P, T]:
    is_on_gpu = torch.cuda.is_available()

    @wraps(call)
    def named(*args: P.args, **kwargs: P.kwargs) -> T:
        if is_on_gpu:
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]  # torch's own
        try:
            with record_function(name):
                return call(*args, **kwargs)
        finally:
            if is_on_gpu:
                torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]  # torch's own

    return named
