"""Measures the processor time that other processes took during a measurement."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

NOTABLE_SHARE = 0.1  # of the processors; what an idle system does by itself is far below
MIN_TICKS = 100  # of all processors; a tick is mostly 10 ms
SHARE_OF_OTHERS = "cpu_share_of_others"  # in the document of a run
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Ticks so far of the processors that we may use: all, those in which they worked, and worked for us."""

    total: int
    busy: int
    ours: int


def processor_time() -> ProcessorTime | None:
    """Return the processor time so far, or None where the system does not report it."""
    if not (PROC / "stat").is_file():
        return None
    total = busy = 0
    for ticks in _ticks_of_processors():
        user, nice, system, idle, waiting, *rest = ticks
        busy += user + nice + system + sum(rest[:3])  # interrupts, and what the hypervisor gave to others
        total += user + nice + system + idle + waiting + sum(rest[:3])
    return ProcessorTime(total, busy, _ticks_of_family(os.getpid()))


def share_of_others(before: ProcessorTime | None, after: ProcessorTime | None) -> float | None:
    """Return the share of all processors' time in between that other processes took.

    Returns None if it is not known, or if the interval was too short.
    """
    if before is None or after is None or after.total - before.total < MIN_TICKS:
        return None
    others = (after.busy - before.busy) - (after.ours - before.ours)
    return min(max(others / (after.total - before.total), 0.0), 1.0)


def background_load_note(shares: Mapping[str, Sequence[float | None]]) -> str | None:
    """Return a sentence on how the other processes' shares affect the policies' numbers.

    None if all were small.
    """
    known = {policy: [share for share in found if share is not None] for policy, found in shares.items()}
    means = {policy: fmean(found) for policy, found in known.items() if found}
    everything = [share for found in known.values() for share in found]
    if not any(share > NOTABLE_SHARE for share in everything):
        return None
    reported = f"Other processes took {_range(everything)} of this machine's processors"
    least, most = min(means, key=lambda policy: means[policy]), max(means, key=lambda policy: means[policy])
    if means[most] - means[least] > NOTABLE_SHARE:
        reported += (
            f", {_range(known[most])} while {most} was measured and {_range(known[least])} while {least} was"
        )
    return (
        f"{reported}. Times are longer for it, those of some policies more than those of others, and which "
        "is best may be another on an idle machine: measure again when nothing else runs."
    )


def _range(shares: Sequence[float]) -> str:
    least, most = (f"{100 * share:.0f}" for share in (min(shares), max(shares)))
    return f"{most} %" if least == most else f"{least} to {most} %"


def _ticks_of_processors() -> Iterator[list[int]]:
    """Yield the counters of each processor that this process may use."""
    ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    for line in (PROC / "stat").read_text().splitlines():
        name, *counters = line.split()
        if name in ours:
            yield [int(counter) for counter in counters]


def _ticks_of_family(ancestor: int) -> int:
    """Ticks of a process and of all that it started, those that have ended among them."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in PROC.glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[int(folder.name)] = int(fields[1])
        ticks[int(folder.name)] = sum(int(field) for field in fields[11:15])  # its own, its dead children's
    return sum(count for process, count in ticks.items() if _is_of(process, ancestor, parents))


def _is_of(process: int, ancestor: int, parents: Mapping[int, int]) -> bool:
    while process not in (ancestor, 0):
        process = parents.get(process, 0)
    return process == ancestor
