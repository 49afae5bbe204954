"""The time that a GPU waits between two captured decode steps, from a trace of its worker."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class Gaps:
    """Seconds from the last kernel of a step to the first of the next.

    `between` them a lease begins, or goes on with more steps than it had.
    """

    inside: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)  # seconds of the steps themselves


def gaps_of(path: Path) -> Gaps:
    """Return the gaps in a Chrome trace of one worker.

    A lease begins, and goes on, with copies from the host.
    """
    events: list[dict[str, Any]] = msgspec.json.decode(path.read_bytes())["traceEvents"]
    launches = {_correlation(e) for e in events if e.get("name") == "cudaGraphLaunch"}
    kernels: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") == "kernel" and (correlation := _correlation(event)) in launches:
            kernels.setdefault(correlation, []).append((event["ts"], event["ts"] + event["dur"]))
    steps = sorted((min(s for s, _ in times), max(e for _, e in times)) for times in kernels.values())
    uploads = sorted(_uploads(events))
    found = Gaps()
    for (begin, end), (next_begin, _) in pairwise(steps):
        is_new = any(begin < at < next_begin for at in uploads)
        (found.between if is_new else found.inside).append((next_begin - end) * 1e-6)
        found.steps.append((end - begin) * 1e-6)
    return found


def _uploads(events: Iterable[Mapping[str, Any]]) -> Iterable[float]:
    return (e["ts"] for e in events if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"])


def _correlation(event: Mapping[str, Any]) -> int:
    correlation: int = event.get("args", {}).get("correlation", -1)
    return correlation
