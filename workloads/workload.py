"""Requests of a workload, with their arrival times."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import inf

import numpy as np

from loong.core.errors import ConfigError
from loong.workloads.data_file import DataFile
from loong.workloads.distributions.arrivals import (
    AT_ONCE,
    Arrivals,
    Closed,
    Paced,
    ReplayedArrivals,
    arrival_times,
    at_rate,
)
from loong.workloads.named import OWN_PACES
from loong.workloads.request import WorkloadRequest
from loong.workloads.spec import Workload, parse_workload


@dataclass(frozen=True, slots=True)
class Pace:
    """Requests per second, infinite if all are sent at once, and how many are in flight at most.

    `burstiness` is None where a trace is replayed: the rate is then its mean.
    """

    request_rate: float
    burstiness: float | None
    max_concurrency: int | None = None


def make_workload(
    text: str,
    num_requests: int,
    *,
    seed: int,
    request_rate: float | None = None,
    burstiness: float | None = None,
    length_scale: float = 1.0,
    output_scale: float | None = None,
) -> list[WorkloadRequest]:
    """Return the same requests for the same arguments, by arrival time; of more, the first ones are the same.

    Lengths and arrivals come from separate streams: another rate leaves the prompts as they are.

    Raises:
        ConfigError: a spec that is wrong, a number out of range, or a file with fewer requests.
    """
    if num_requests < 1:
        raise ConfigError(f"--num-requests {num_requests} is not at least 1")
    requests = list(
        islice(
            endless_workload(
                text,
                seed=seed,
                request_rate=request_rate,
                burstiness=burstiness,
                length_scale=length_scale,
                output_scale=output_scale,
            ),
            num_requests,
        )
    )
    if len(requests) < num_requests:
        raise ConfigError(f"--num-requests {num_requests} is more than the {len(requests)} that {text} has")
    return requests


def endless_workload(
    text: str,
    *,
    seed: int,
    request_rate: float | None = None,
    burstiness: float | None = None,
    length_scale: float = 1.0,
    output_scale: float | None = None,
) -> Iterator[WorkloadRequest]:
    """Return the requests of `make_workload`, one after the other: without end, or to the end of a file.

    `request_rate` and `burstiness` take precedence over the spec. A replay with only another rate is the same
    trace at another speed. `output_scale` None is described at `RequestShape.scaled`.

    Raises:
        ConfigError: a spec that is wrong, or a number out of range.
    """
    if not 0 < length_scale <= 1:
        raise ConfigError(f"--length-scale {length_scale:g} is not above 0 and at most 1; try 1/64")
    if output_scale is not None and not 0 < output_scale <= 1:
        raise ConfigError(f"--output-scale {output_scale:g} is not above 0 and at most 1; try 1/8")
    workload = parse_workload(text)
    arrivals = _arrivals(workload, request_rate, burstiness)
    shape_seed, arrival_seed = np.random.SeedSequence(seed).spawn(2)
    requests = _requests(workload, arrivals, shape_seed, np.random.default_rng(arrival_seed))
    return (replace(request, shape=request.shape.scaled(length_scale, output_scale)) for request in requests)


def pace_of(text: str, request_rate: float | None = None, burstiness: float | None = None) -> Pace:
    """Return the pace of `endless_workload` with these arguments; passing the pace back changes nothing.

    Raises:
        ConfigError: a spec that is wrong, a number out of range, or a file that cannot be read.
    """
    workload = parse_workload(text)
    arrivals = _arrivals(workload, request_rate, burstiness)
    match arrivals:
        case Paced():
            return Pace(arrivals.rate, arrivals.burstiness)
        case Closed():
            return Pace(AT_ONCE.rate, AT_ONCE.burstiness, arrivals.concurrency)
        case ReplayedArrivals():
            return Pace(_recorded_rate(workload) * arrivals.speedup, None)


def origin_of(text: str) -> str:
    """Return where the lengths of a workload come from, for a report."""
    files = ", ".join(str(path) for path in parse_workload(text).files)
    return f"lengths from {files or 'built-in distributions'}"


def _arrivals(workload: Workload, request_rate: float | None, burstiness: float | None) -> Arrivals:
    own = _own_arrivals(workload)
    if isinstance(own, ReplayedArrivals) and request_rate is not None and burstiness is None:
        speedup = request_rate / _recorded_rate(workload)
        if 0 < speedup < inf:
            return ReplayedArrivals(speedup)
    if workload.arrivals is None and request_rate is not None:
        own = AT_ONCE  # a named pace belongs to a rate: with another rate, only the arguments count
    return at_rate(own, request_rate, burstiness)


def _own_arrivals(workload: Workload) -> Arrivals:
    """Return the arrivals of the spec, a named workload, or a recording; all at once if there are none."""
    if workload.arrivals is not None:
        return workload.arrivals
    if isinstance(workload.source, DataFile):
        return ReplayedArrivals() if workload.source.recording().times else AT_ONCE
    return OWN_PACES.get(str(workload.source), AT_ONCE)


def _recorded_rate(workload: Workload) -> float:
    assert isinstance(workload.source, DataFile)
    return workload.source.recording().mean_rate


def _requests(
    workload: Workload, arrivals: Arrivals, shape_seed: np.random.SeedSequence, rng: np.random.Generator
) -> Iterator[WorkloadRequest]:
    if isinstance(arrivals, ReplayedArrivals):
        assert isinstance(workload.source, DataFile)
        return workload.source.replayed(shape_seed, arrivals.speedup)
    pace = arrivals if isinstance(arrivals, Paced) else AT_ONCE
    shapes = workload.source.shapes(shape_seed)
    times = arrival_times(rng, pace.rate, pace.burstiness)
    return (WorkloadRequest(time, shape) for shape, time in zip(shapes, times, strict=False))
