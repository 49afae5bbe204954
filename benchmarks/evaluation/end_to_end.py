"""Every policy under every workload: latencies a token, goodput, SLO attainment by rate and scale of the SLO.

LoongServe's figure 10. Baselines are policies of the same engine with the same kernels. In virtual
time by default; on servers with `--device cuda` (dummy weights) or `--device cpu`.

    python benchmarks/evaluation/end_to_end.py --output-dir out --request-rate 0.5,1,2,4  # simulated
    python benchmarks/evaluation/end_to_end.py --output-dir out --device cpu --num-instances 2 \\
        --length-scale 1/64 \\
        --workload mixed --policy esp,static-sp --num-requests 30 --request-rate 4,8          # CPUs, a minute
    python benchmarks/evaluation/end_to_end.py --output-dir out --device cuda --num-instances 8  # GPUs, hours
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from line_picture import write_lines
from loong_runs import end
from result import print_result, script_parser
from serving_runs import (
    add_serving_flags,
    attainment_panel,
    goodput_table,
    latency_panels,
    numbers_of,
    scale_panel,
    serve,
)

POLICIES = "esp,tp,static-sp,replicas,chunked,disaggregated-2,esp-paper"
WORKLOADS = ("sharegpt", "leval", "lveval", "mixed")


def main() -> None:
    parser = script_parser("end_to_end", __doc__)
    add_serving_flags(parser, POLICIES, WORKLOADS)
    args = parser.parse_args()
    results = []
    for workload in args.workload:
        served = serve(args, workload)
        panels = [attainment_panel(served), scale_panel(served), *latency_panels(served)]
        write_lines(panels, args.output_dir, f"end_to_end-{workload}", num_columns=3)
        results.append(served)
    print(goodput_table(args, results))
    numbers = {
        **numbers_of(args, results),
        "attainment": {
            served.workload: [(p.policy, p.rate, p.attainment) for p in served.points] for served in results
        },
    }
    print_result("end_to_end", numbers, save=args.save)
    end([served.document for served in results])


if __name__ == "__main__":
    main()
