"""All-class goodput against the TPOT target, in virtual time: the picture of docs/goodput.md.

The rule is `tight` with other TPOT targets, the workload mixed, on eight H200s. Cells are lines of
results/all_class_goodput.jsonl, as those of goodput.py; cells in the file are not searched again. A point is
the mean over seeds. Needs no device; the picture needs matplotlib.

    python benchmarks/evaluation/goodput_picture.py                            # hours of a processor
    python benchmarks/evaluation/goodput_picture.py --show                     # the picture of what is there
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from goodput_cells import Bounds, Cell, add_cell_flags, by_seed, cells_of, find_all, found_in

sys.path.append(str(Path(__file__).parents[1] / "support"))

from line_picture import Line, Panel, write_lines

RULE = "tight"
RULE_TPOT_MS = 50.0
TPOTS_MS = (8.0, 10.0, 15.0, 25.0, 50.0)
POLICIES = (
    "esp",
    "esp-fixed-8",
    "esp-fixed-4",
    "esp-fixed-1",
    "esp-disaggregated-1",
    "esp-disaggregated-2",
    "esp-disaggregated-4",
    "esp-paper",
)
IMAGES = Path(__file__).parents[2] / "docs" / "images"


def rule_of(tpot_ms: float) -> str:
    """Return the rule with a TPOT target; at its own target it is a cell of the table."""
    return RULE if tpot_ms == RULE_TPOT_MS else f"{RULE},tpot:{tpot_ms:g}"


def line_of(found: Mapping[Cell, Bounds], policy: str, tpots_ms: Sequence[float]) -> Line:
    """Return the goodput of a policy at each target of which any seed is known."""
    line = []
    for tpot_ms in tpots_ms:
        rates = [
            bounds.rate
            for cell, bounds in found.items()
            if (cell.policy, cell.slo) == (policy, rule_of(tpot_ms))
        ]
        if rates:
            line.append((tpot_ms, fmean(rates)))
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--policy", nargs="+", default=POLICIES, help=f"({' '.join(POLICIES)})")
    parser.add_argument("--workload", default="mixed", help="workload to simulate (%(default)s)")
    parser.add_argument(
        "--tpot",
        nargs="+",
        type=float,
        default=TPOTS_MS,
        metavar="MS",
        help="TPOT targets in ms (%(default)s)",
    )
    parser.add_argument(
        "--output-dir", type=Path, default=IMAGES, help="folder for the picture (%(default)s)"
    )
    add_cell_flags(parser)
    args = parser.parse_args()
    tpots = sorted(args.tpot)
    cells = cells_of(args, [args.workload], [rule_of(tpot) for tpot in tpots], args.policy)
    found = found_in(args.file, cells) if args.show else find_all(cells, args.file, args.jobs)
    print(f"| policy | {' | '.join(f'{tpot:g} ms' for tpot in tpots)} |")
    print(f"|---|{'---:|' * len(tpots)}")
    for policy in args.policy:
        rows = (
            [found.get(c) for c in cells if (c.policy, c.slo) == (policy, rule_of(tpot))] for tpot in tpots
        )
        print(f"| `{policy}` | {' | '.join(map(by_seed, rows))} |")
    lines = {policy: line for policy in args.policy if (line := line_of(found, policy, tpots))}
    panel = Panel(
        f"{args.workload}: TTFT as in {RULE}",
        "TPOT target (ms)",
        "all-class goodput (requests/s)",
        lines,
    )
    for path in write_lines([panel], args.output_dir, "goodput_by_tpot"):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
