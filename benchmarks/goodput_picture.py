"""The picture of docs/goodput.md: P90 goodput of every policy, as its tables have it.

A panel a workload and SLO rule, of one model; workloads are left out of which a policy was not run. No
device is needed, and of packages numpy, msgspec and matplotlib.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from goodput import RULES
from goodput_cells import Cell
from goodput_table import POLICIES, WORKLOADS, Entry, entries
from result import FOLDER

from loong.workloads.plot_goodput import GoodputBar, goodput_figure
from loong.workloads.plot_style import POLICY_STYLES, house_style, write_figure

GOAL = 0.9
IMAGES = Path(__file__).parents[1] / "docs" / "images"


def panels_of(
    found: Mapping[Cell, Entry], model: str, rules: Sequence[str]
) -> Iterator[tuple[str, list[GoodputBar]]]:
    """A row of panels a workload of which every policy is known under every rule, a column a rule."""
    policies = [policy for policy in POLICY_STYLES if policy in POLICIES]
    for workload in WORKLOADS:
        if all(Cell(model, workload, rule, policy) in found for rule, policy in product(rules, policies)):
            for rule in rules:
                yield (
                    f"{workload}, {rule}",
                    [_bar(policy, found[Cell(model, workload, rule, policy)]) for policy in policies],
                )


def _bar(policy: str, entry: Entry) -> GoodputBar:
    return GoodputBar(policy, entry.rate, is_at_least=not entry.is_found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, default=FOLDER / "goodput.jsonl")
    parser.add_argument("--points", type=Path, default=FOLDER / "goodput_points.jsonl")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--slo", nargs="+", default=RULES)
    parser.add_argument("--output", type=Path, default=IMAGES / "goodput.svg", help="a .png or .svg")
    args = parser.parse_args()
    panels = list(panels_of(entries(args.file, args.points), args.model, args.slo))
    if not panels:
        raise SystemExit(f"{args.file} has no workload of {args.model} with all of {', '.join(args.slo)}")
    with house_style():
        write_figure(goodput_figure(panels, GOAL), [args.output])
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
