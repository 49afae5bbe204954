"""The tables of docs/goodput.md, from results/goodput.jsonl and, of searches that did not end, single runs.

Of lines about the same cell the last counts. A letter says at which commit a cell was made, none at the most
frequent one. `90-120` is between these, `>90` at least that: not searched further. Times are the least and
the most that such bounds leave. No device is needed.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from pathlib import Path

from goodput import MODELS, RULES, STATIC_POLICIES
from goodput_cells import Cell, Setting, rows_of
from rate_search import Attempts, RateSearch
from result import FOLDER

SETTING = Setting("h200", 8, duration=120.0, precision=0.1, seed=0)
WORKLOADS = ("sharegpt", "leval", "lveval", "mixed", "zipf1.0", "zipf1.2", "zipf1.4")
POLICIES = ("tp", "static-sp", "replicas", "chunked", "chunked-replicas", "disaggregated", "esp-paper", "esp")
PAGE = Path(__file__).parents[1] / "docs" / "goodput.md"
BEGIN, END = "<!-- tables by goodput_table.py -->\n", "<!-- end of tables -->\n"
NUM_LEAST = 4
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Entry:
    """A goodput, or what is known of it: that it is at least `rate`, and less than `too_high`."""

    rate: float
    too_high: float
    commit: str
    is_found: bool = False

    @property
    def most(self) -> float:
        """What the goodput is at most."""
        return self.rate if self.is_found else self.too_high

    def text(self, letters: Mapping[str, str]) -> str:
        """Requests a second, and a letter for the commit."""
        return f"{_between(self.rate, self.most)} {letters[self.commit]}".rstrip()


def _between(least: float, most: float, num_digits: int = 3, unit: str = "") -> str:
    """A number, or both of its bounds."""
    low, high = (f"{bound:.{num_digits}g}" for bound in (least, most))
    if low == high:
        return low + unit
    if most == inf:
        return f">{low}{unit}"
    return f"{low}-{high}{unit}" if least else f"<{high}{unit}"


def _told_times(least: float, most: float) -> str:
    """Two digits, as goodputs are found to 10 %, and three of bounds, which are to stay bounds."""
    return _between(least, most, 2 if least == most else 3, "x")


def entries(goodputs: Path, points: Path) -> dict[Cell, Entry]:
    """What is known of each cell of the table."""
    found: dict[Cell, Entry] = {}
    for cell, row in rows_of(goodputs):
        if _is_like(cell, row):
            found[cell] = Entry(
                float(str(row["request_rate"])), inf, str(row["git_commit"])[:7], is_found=True
            )
    runs: dict[Cell, dict[str, Attempts]] = {}
    for cell, row in rows_of(points):
        if _is_like(cell, row):
            commit = str(row["git_commit"])[:7]
            attempts = runs.setdefault(cell, {}).setdefault(commit, Attempts())
            attempts.attains[float(str(row["request_rate"]))] = bool(row["attains"])
    for cell, by_commit in runs.items():
        commit, attempts = list(by_commit.items())[-1]
        if cell not in found:
            rate, too_high = attempts.rate or 0.0, attempts.too_high or inf
            is_found = rate > 0.0 and RateSearch(rate, SETTING.precision, attempts=attempts).is_found
            found[cell] = Entry(rate, too_high, commit, is_found)
    return found


def _is_like(cell: Cell, row: Mapping[str, object]) -> bool:
    like = SETTING.of(cell)
    return all(row[name] == getattr(like, name) for name in like.__slots__)


def tables(found: Mapping[Cell, Entry]) -> Iterator[str]:
    """A table a model and rule, a row a workload, and which letter is which commit."""
    commits = [commit for commit, _ in Counter(entry.commit for entry in found.values()).most_common()]
    letters = dict(zip(commits, ("", *LETTERS), strict=False))
    others = ", ".join(f"{letters[commit]}: {commit}" for commit in commits[1:])
    yield f"Commit {commits[0]}" + (f"; {others}." if others else ".")
    for model in MODELS:
        for slo in RULES:
            yield f"**{model}, {slo}**"
            yield _table(model, slo, found, letters)
    yield from _least_gains(found)


def _table(model: str, slo: str, found: Mapping[Cell, Entry], letters: Mapping[str, str]) -> str:
    header = (
        "workload",
        *(f"`{policy}`" for policy in POLICIES),
        "`esp` / best static",
        "`esp` / `esp-paper`",
    )
    lines = [header, ("---", *("---:" for _ in header[1:]))]
    for workload in WORKLOADS:
        row = {policy: found.get(Cell(model, workload, slo, policy)) for policy in POLICIES}
        cells = ["-" if entry is None else entry.text(letters) for entry in row.values()]
        static = [row[policy] for policy in STATIC_POLICIES]
        times = (_times(row["esp"], static), _times(row["esp"], [row["esp-paper"]]))
        lines.append((workload, *cells, *times))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _times(entry: Entry | None, others: Sequence[Entry | None]) -> str:
    """How many times the best of others, so far as they are known."""
    least, most = _gain(entry, others)
    return "-" if (least, most) == (0.0, inf) else _told_times(least, most)


def _gain(entry: Entry | None, others: Sequence[Entry | None]) -> tuple[float, float]:
    """How many times the best of others it is, at least and at most; 0 and infinity if that is not known."""
    if entry is None:
        return 0.0, inf
    least = max(0.0 if other is None else other.rate for other in others)
    most = max(inf if other is None else other.most for other in others)
    return (entry.rate / most if most else 0.0), (entry.most / least if least else inf)


def _least_gains(found: Mapping[Cell, Entry]) -> Iterator[str]:
    """Where `esp` gains least over the best static policy, and over the paper's."""
    for what, policies in (
        ("the best static policy", STATIC_POLICIES),
        ("`esp-paper`", ("esp-paper",)),
    ):
        gains = {
            f"{workload} ({model}, {slo})": _gain(
                found.get(Cell(model, workload, slo, "esp")),
                [found.get(Cell(model, workload, slo, policy)) for policy in policies],
            )
            for model, workload, slo in product(MODELS, WORKLOADS, RULES)
        }
        known = {name: gain for name, gain in gains.items() if gain[0]}
        least = sorted(known, key=lambda name: known[name])[:NUM_LEAST]
        told = ", ".join(f"{_told_times(*known[name])} in {name}" for name in least)
        yield f"`esp` over {what} gains least (of {len(known)} rows): {told}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, default=FOLDER / "goodput.jsonl")
    parser.add_argument("--points", type=Path, default=FOLDER / "goodput_points.jsonl")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}, between its two marks")
    args = parser.parse_args()
    text = "\n\n".join(tables(entries(args.file, args.points)))
    print(text)
    if args.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
