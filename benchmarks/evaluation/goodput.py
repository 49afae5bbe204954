"""All-class goodput of every policy, in virtual time on eight H200s: the tables of docs/goodput.md.

All-class goodput is the highest rate at which 90 % of the requests of every length class meet the SLO. The
backlog of work must not grow either. Each cell is searched with the same requests at every rate, once for
each seed, and is a line of results/all_class_goodput.jsonl. Cells in the file are not searched again, so that
a run can be stopped and resumed. Needs no device.

    python benchmarks/evaluation/goodput.py --policy esp replicas --slo tight  # minutes; without flags hours
    python benchmarks/evaluation/goodput.py --table workloads --jobs 8
    python benchmarks/evaluation/goodput.py --show --write                     # write table `main`
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from goodput_cells import Bounds, Cell, add_cell_flags, by_seed, cells_of, find_all, found_in
from page_table import DOCS, write_table

FAIR_POLICIES = (
    "esp",
    "esp-fixed-8",
    "esp-fixed-4",
    "esp-fixed-2",
    "esp-fixed-1",
    "esp-disaggregated-1",
    "esp-disaggregated-2",
    "esp-disaggregated-3",
    "esp-disaggregated-4",
)
OTHER_POLICIES = (
    "esp-paper",
    "static-sp",
    "replicas",
    "chunked-replicas",
    "disaggregated-4",
    "tp",
    "chunked",
)
ABLATIONS = (
    "esp",
    "esp-fcfs",
    "esp-no-chunks",
    "esp-no-apart",
    "esp-no-light-apart",
    "esp-no-guests",
    "esp-no-spread",
    "esp-no-moves",
    "esp-no-lone",
)
PAGE = DOCS / "goodput.md"


@dataclass(frozen=True, slots=True)
class Table:
    """The cells of one table: every policy under every rule on every workload."""

    workloads: tuple[str, ...]
    rules: tuple[str, ...]
    policies: tuple[str, ...]


TABLES = {
    "main": Table(
        ("mixed", "zipf1.0"),
        ("tight", "interactive"),
        (*FAIR_POLICIES, *OTHER_POLICIES),
    ),
    "workloads": Table(("zipf1.2", "leval"), ("tight",), FAIR_POLICIES),
    "ablations": Table(("zipf1.2", "leval"), ("tight", "interactive"), ABLATIONS),
}


def table(found: Mapping[Cell, Bounds], cells: Sequence[Cell], policies: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table with a row for each policy and a column for each workload and rule."""
    columns = list(dict.fromkeys((cell.workload, cell.slo) for cell in cells))
    yield f"|policy|{'|'.join(f'{workload}, `{slo}`' for workload, slo in columns)}|"
    yield f"|---|{'---:|' * len(columns)}"
    for policy in policies:
        row = (
            [found.get(c) for c in cells if (c.workload, c.slo, c.policy) == (*column, policy)]
            for column in columns
        )
        yield f"|`{policy}`|{'|'.join(map(by_seed, row))}|"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--table", choices=TABLES, default="main", help="whose cells (%(default)s)")
    parser.add_argument("--policy", nargs="+", help="instead of the table's")
    parser.add_argument("--workload", nargs="+", help="instead of the table's")
    parser.add_argument("--slo", nargs="+", help="rules instead of the table's")
    parser.add_argument("--write", action="store_true", help=f"write the table into docs/{PAGE.name}")
    add_cell_flags(parser)
    args = parser.parse_args()
    asked = TABLES[args.table]
    policies = args.policy or asked.policies
    cells = cells_of(args, args.workload or asked.workloads, args.slo or asked.rules, policies)
    found = found_in(args.file, cells) if args.show else find_all(cells, args.file, args.jobs)
    lines = list(table(found, cells, policies))
    print("\n".join(lines))
    if missing := [cell for cell in cells if cell not in found]:
        print(f"{len(missing)} of {len(cells)} cells are missing")
    if args.write and not write_table(PAGE, args.table, "goodput.py", lines):
        parser.error(f"{PAGE.name} has no place for table {args.table}")


if __name__ == "__main__":
    main()
