"""The picture of docs/goodput.md: P90 goodput of every policy, from results/goodput.jsonl.

A panel a workload and SLO rule, of one model; of lines about the same, the last counts. No device is needed,
and of packages numpy, msgspec and matplotlib.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from result import FOLDER

from loong.workloads.plot_goodput import GoodputBar, goodput_figure
from loong.workloads.plot_style import POLICY_STYLES, house_style, write_figure

GOAL = 0.9
RULES = ("tight", "loongserve-12")
IMAGES = Path(__file__).parents[1] / "docs" / "images"


def rates_of(file: Path, model: str) -> dict[tuple[str, str], dict[str, float]]:
    """Requests a second by policy, for each workload and rule."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        if row["model"] == model:
            by_policy = found.setdefault((row["workload"], row["slo"]), {})
            by_policy[row["policy"]] = row["request_rate"]
    return found


def panels_of(
    rates: dict[tuple[str, str], dict[str, float]], rules: Sequence[str]
) -> Iterator[tuple[str, list[GoodputBar]]]:
    """A row of panels a workload of which every rule is known, a column a rule."""
    for workload in dict.fromkeys(workload for workload, _ in rates):
        if all((workload, rule) in rates for rule in rules):
            for rule in rules:
                known = rates[workload, rule]
                bars = [GoodputBar(policy, known[policy]) for policy in POLICY_STYLES if policy in known]
                yield f"{workload}, {rule}", bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, default=FOLDER / "goodput.jsonl")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--slo", nargs="+", default=RULES)
    parser.add_argument("--output", type=Path, default=IMAGES / "goodput.svg", help="a .png or .svg")
    args = parser.parse_args()
    panels = list(panels_of(rates_of(args.file, args.model), args.slo))
    if not panels:
        raise SystemExit(f"{args.file} has no workload of {args.model} with all of {', '.join(args.slo)}")
    with house_style():
        write_figure(goodput_figure(panels, GOAL), [args.output])
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
