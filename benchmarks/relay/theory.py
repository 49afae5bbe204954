"""Prints the speed-up of attention by one pass over a shared prefix, in theory, for several models.

Equation 10 of RelayAttention, and its form for GQA with a ceiling where computing takes longer than reading
(docs/relay-attention.md). `--save` keeps the numbers and a picture, docs/images/relay-theory.svg. Needs no
device.

    python benchmarks/relay/theory.py --save
"""

import sys
from itertools import product
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from line_picture import Panel, write_lines
from relay_theory import Heads, published_speed_up
from result import print_result, script_parser

IMAGES = Path(__file__).parents[2] / "docs" / "images"
MODELS = {"30B-like, 52 heads": (52, 52), "Llama-2-7B": (32, 32), "Llama-3.1-8B": (32, 8)}
NUM_SHARED = (64, 256, 1024, 4096, 16384, 32768)
NUM_QUERIES = (4, 8, 16, 32, 64, 256)
NUM_ALONE = (128, 256)


def main() -> None:
    parser = script_parser("relay_theory", __doc__)
    parser.add_argument("--flops-a-byte", type=float, default=160.0, help="of the device (%(default)s: H200)")
    args = parser.parse_args()
    heads = {name: Heads(*given, flops_a_byte=args.flops_a_byte) for name, given in MODELS.items()}
    print(f"{'c':>5}{'b':>5}{'s':>8}{'equation 10':>13}" + "".join(f"{name:>20}" for name in heads))
    rows = []
    for alone, queries, shared in product(NUM_ALONE, NUM_QUERIES, NUM_SHARED):
        published = published_speed_up(shared, alone, queries)
        found = {name: its.speed_up(shared, alone, queries) for name, its in heads.items()}
        rows.append({"c": alone, "b": queries, "s": shared, "equation 10": published, **found})
        cells = "".join(f"{value:>20.2f}" for value in found.values())
        print(f"{alone:>5}{queries:>5}{shared:>8}{published:>13.2f}{cells}")
    if args.save:
        panels = [
            Panel(
                f"{queries} queries, 128 tokens each alone",
                "shared tokens",
                "speed-up of attention",
                {
                    name: [(row["s"], row[name]) for row in rows if (row["b"], row["c"]) == (queries, 128)]
                    for name in ("equation 10", *heads)
                },
            )
            for queries in (8, 32, 64, 256)
        ]
        write_lines(panels, IMAGES, "relay-theory")
    print_result("relay_theory", {"flops_a_byte": args.flops_a_byte, "rows": rows}, save=args.save)


if __name__ == "__main__":
    main()
