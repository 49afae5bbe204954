"""The common form of all files of requests."""

from dataclasses import dataclass
from pathlib import Path

from loong.core.errors import ConfigError
from loong.workloads.request import RequestShape


@dataclass(frozen=True, slots=True)
class Row:
    """A request of a file, with its time in seconds, if it has one."""

    time: float | None
    shape: RequestShape


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """A file's requests in its order: all of them have a time, or none.

    Within a file, token runs of one seed are the same tokens. With `keeps_seeds` the seeds are used
    unchanged, without an offset.
    """

    format: str
    rows: tuple[Row, ...]
    keeps_seeds: bool = False

    @property
    def times(self) -> list[float]:
        """Return the seconds at which requests came; empty if the format has none."""
        return [row.time for row in self.rows if row.time is not None]

    @property
    def mean_rate(self) -> float:
        """Return the requests per second between the first and the last; infinite if all came at once."""
        times = self.times
        span = max(times) - min(times) if times else 0.0
        return (len(times) - 1) / span if span else float("inf")


def bad(path: Path, place: str, problem: str) -> ConfigError:
    """Return an error that names the file and the place in it, such as `line 3`."""
    return ConfigError(f"{path}, {place}: {problem}")
