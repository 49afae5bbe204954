"""A workload in a line of text: `0.7*sharegpt+0.3*zipf(1.2,10,200000)@gamma(4,0.5)`."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from loong.core.errors import ConfigError
from loong.core.similar_words import meant
from loong.workloads.client.scanner import NUMBER, Scanner
from loong.workloads.data_file import PLAIN_PATH, QUOTED_PATH, DataFile
from loong.workloads.distributions.arrivals import Arrivals, Closed, Paced, ReplayedArrivals
from loong.workloads.distributions.families import FAMILIES, built, check_count, family_usage, whole
from loong.workloads.distributions.mix import Mix, Single
from loong.workloads.named import NAMES, Named

AnySource: TypeAlias = Single | Mix

FILE = "trace:"
ARRIVALS: dict[str, tuple[tuple[str, ...], Callable[..., Arrivals]]] = {
    "poisson": (("RATE",), Paced),
    "gamma": (("RATE", "BURSTINESS"), Paced),
    "constant": (("RATE",), lambda rate: Paced(rate, float("inf"))),
    "closed": (("CONCURRENCY",), lambda concurrency: Closed(whole("CONCURRENCY", concurrency))),
    "replay": (("SPEEDUP",), ReplayedArrivals),
}

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9.-]*")


@dataclass(frozen=True, slots=True)
class Workload:
    """A source of requests and, if the spec has them, its arrivals.

    `parse_workload(str(workload)) == workload`.
    """

    source: AnySource
    arrivals: Arrivals | None = None

    def __post_init__(self) -> None:
        if isinstance(self.arrivals, ReplayedArrivals) and not isinstance(self.source, DataFile):
            raise ConfigError(
                f"{self.source} has no times to replay; only one trace:FILE alone can have them"
            )

    def __str__(self) -> str:
        return f"{self.source}" if self.arrivals is None else f"{self.source}@{self.arrivals}"

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files that are read."""
        sources = (
            [source for _, source in self.source.parts] if isinstance(self.source, Mix) else [self.source]
        )
        return tuple(Path(source.path) for source in sources if isinstance(source, DataFile))


def parse_workload(text: str) -> Workload:
    """Read a spec: SOURCE or a mix WEIGHT*SOURCE+WEIGHT*SOURCE, and @ARRIVALS if it has its own.

    Raises:
        ConfigError: the text is wrong; the message says where, and what may stand there.
    """
    scanner = Scanner("workload", text)
    parts = [_part(scanner)]
    while scanner.take("+"):
        parts.append(_part(scanner))
    arrivals = _speedup(scanner) or _arrivals(scanner)
    if not scanner.is_at_end:
        scanner.fail("+, @ or the end is expected" if arrivals is None else "the end is expected")
    with scanner.blaming(0):
        return Workload(parts[0][1] if len(parts) == 1 else Mix(tuple(parts)), arrivals)


def usage() -> str:
    """Return what a spec may be, for help and errors."""
    return ", ".join((*NAMES, *map(family_usage, FAMILIES.values()), f"{FILE}FILE"))


def _part(scanner: Scanner) -> tuple[float, Single]:
    start = scanner.position
    weight = scanner.take(NUMBER)
    if weight is None:
        return 1.0, _source(scanner)
    if not 0 < float(weight) < float("inf"):
        scanner.fail(f"the weight {weight} is not above 0", start)
    if not scanner.take("*"):
        scanner.fail(f"* is expected after the weight {weight}")
    return float(weight), _source(scanner)


def _source(scanner: Scanner) -> Single:
    start = scanner.position
    if scanner.take(FILE):
        path = scanner.take(QUOTED_PATH) or scanner.take(PLAIN_PATH)
        if path is None:
            scanner.fail("a path is expected, in '' if it has blanks or any of @+*(),")
        with scanner.blaming(start):
            return DataFile(path.strip("'"))
    name = scanner.take(_NAME) or ""
    if name in NAMES:
        return Named(name)
    if name not in FAMILIES:
        wrong = f"{name!r} is no workload" if name else "a workload is missing"
        guess = meant(name, (*NAMES, *FAMILIES, FILE))
        scanner.fail(f"{wrong}; choose from {usage()}{guess}", start)
    numbers = scanner.numbers() or []
    with scanner.blaming(start):
        return built(FAMILIES[name], numbers)


def _speedup(scanner: Scanner) -> ReplayedArrivals | None:
    start = scanner.position
    if not scanner.take(",speedup="):
        return None
    number = scanner.take(NUMBER)
    if number is None:
        scanner.fail("a number is expected")
    with scanner.blaming(start):
        return ReplayedArrivals(float(number))


def _arrivals(scanner: Scanner) -> Arrivals | None:
    if not scanner.take("@"):
        return None
    start = scanner.position
    name = scanner.take(_NAME) or ""
    if name not in ARRIVALS:
        allowed = ", ".join(f"{each}({','.join(words)})" for each, (words, _) in ARRIVALS.items())
        wrong = f"{name!r} is no way to arrive" if name else "a way to arrive is missing"
        scanner.fail(f"{wrong}; choose from {allowed}{meant(name, ARRIVALS)}", start)
    words, build = ARRIVALS[name]
    numbers = scanner.numbers() or []
    num_needed = 0 if name == "replay" else len(words)
    with scanner.blaming(start):
        check_count(f"{name}({','.join(words)})", len(numbers), range(num_needed, len(words) + 1))
        return build(*numbers)
