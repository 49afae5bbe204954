"""Requests of a file: a published trace or data set, or one of our own."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import numpy as np

from loong.core.errors import ConfigError
from loong.workloads.datasets.read import read_recording
from loong.workloads.datasets.recording import RecordedTrace
from loong.workloads.request import RequestShape, WorkloadRequest

# A path as a spec writes it: in quotes, if it has a character with a meaning in specs.
PLAIN_PATH = re.compile(r"[^@+*(),'\s]+")
QUOTED_PATH = re.compile(r"'[^'\n]+'")


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file, by its path as written. It is read when its requests are asked for."""

    path: str

    def __post_init__(self) -> None:
        if not QUOTED_PATH.fullmatch(f"'{self.path}'"):
            raise ConfigError(
                f"{self.path!r} is no path of a trace: it is empty or has a quote or a new line"
            )

    def __str__(self) -> str:
        return f"trace:{self.path}" if PLAIN_PATH.fullmatch(self.path) else f"trace:'{self.path}'"

    def recording(self) -> RecordedTrace:
        """Read the file.

        Raises:
            ConfigError: see `read_recording`.
        """
        return read_recording(Path(self.path))

    def shapes(self, seed: np.random.SeedSequence) -> Iterator[RequestShape]:
        """Return every request of the file once, in its order.

        A file without times starts at a random request.

        The seed chooses the tokens, unless the file says which.
        """
        recording = self.recording()
        rng = np.random.default_rng(seed)
        offset = 0 if recording.keeps_seeds else int(rng.integers(2**62, 2**63 - 2**53))
        start = 0 if recording.times else int(rng.integers(len(recording.rows)))
        for row in (*recording.rows[start:], *recording.rows[:start]):
            yield row.shape.reseeded(offset)

    def replayed(self, seed: np.random.SeedSequence, speedup: float) -> Iterator[WorkloadRequest]:
        """Return the requests at their times, the first of others' files at 0.

        A session is where its first turn is.

        Raises:
            ConfigError: the format has no times.
        """
        recording = self.recording()
        if not recording.times:
            raise ConfigError(
                f"{self.path} is {recording.format}, which has no times to replay; give poisson(RATE)"
            )
        start = 0.0 if recording.keeps_seeds else min(recording.times)
        requests = [
            WorkloadRequest((time - start) / speedup, shape)
            for time, shape in zip(recording.times, self.shapes(seed), strict=True)
        ]
        return _by_start(requests)


def _by_start(requests: Iterable[WorkloadRequest]) -> Iterator[WorkloadRequest]:
    """Return requests by arrival, each session by its first."""
    starts: list[tuple[float, WorkloadRequest]] = []
    for request in requests:
        start = starts[-1][0] if request.shape.is_follower else request.arrival_time
        starts.append((start, request))
    return (request for _, request in sorted(starts, key=itemgetter(0)))
