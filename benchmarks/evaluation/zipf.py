"""Compares elastic and fixed parallelism by P90 goodput under Zipf's law of lengths.

Lengths from 10 to 200,000 tokens are drawn by three exponents. They run on elastic groups, on one group of
all instances (tensor parallel or striped) and on replicas, all else equal: LoongServe's ablation of its
figure 12, where elasticity gives 1.5 to 3.1 times the goodput of each. In virtual time by default, or on
servers.

    python benchmarks/evaluation/zipf.py --output-dir out  # simulated, minutes
    python benchmarks/evaluation/zipf.py --output-dir out --device cpu --num-instances 2 \\
        --length-scale 1/64 \\
        --workload zipf1.2 --num-requests 100 --request-rate 8,40                         # CPUs, two minutes
    python benchmarks/evaluation/zipf.py --output-dir out --device cuda --num-instances 8  # GPUs, hours
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from line_picture import write_lines
from loong_runs import end
from result import print_result, script_parser
from serving_runs import add_serving_flags, attainment_panel, goodput_table, numbers_of, serve

POLICIES = "esp,esp-paper,tp,static-sp,replicas"
WORKLOADS = ("zipf1.0", "zipf1.2", "zipf1.4")


def main() -> None:
    parser = script_parser("zipf", __doc__)
    add_serving_flags(parser, POLICIES, WORKLOADS)
    args = parser.parse_args()
    results = [serve(args, workload) for workload in args.workload]
    write_lines([attainment_panel(served) for served in results], args.output_dir, "zipf", num_columns=3)
    print(goodput_table(args, results))
    print_result("zipf", numbers_of(args, results), save=args.save)
    end([served.document for served in results])


if __name__ == "__main__":
    main()
