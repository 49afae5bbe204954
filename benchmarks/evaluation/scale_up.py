"""Measures how often groups grow while they decode, and the gain.

By rate, it reports SLO attainment, goodput, and how often a group gained an instance in ten seconds. The
policies are `esp`, LoongServe's equations, and `replicas`, none of which can use another's room. LoongServe's
figure 13: 2.87 times the goodput on sharegpt. In virtual time by default, or on servers.

    python benchmarks/evaluation/scale_up.py --output-dir out --model llama-2-7b --device a800 \\
        --num-instances 4 --kv-cache-tokens 16000 --workload 'uniform(100,12000,1000)' --num-requests 100 \\
        --request-rate 0.3,0.4,0.5,0.6,0.7,0.8                       # simulated; little memory: two minutes
    python benchmarks/evaluation/scale_up.py --output-dir out --device cpu --num-instances 2 \\
        --length-scale 1/16 --kv-cache-tokens 160 --num-requests 60 --request-rate 8,16  # CPUs, a minute
    python benchmarks/evaluation/scale_up.py --output-dir out --device cuda --num-instances 8
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from line_picture import Panel, lines_of, write_lines
from loong_runs import end
from result import print_result, script_parser
from serving_runs import Served, add_serving_flags, attainment_panel, goodput_table, numbers_of, serve

from loong.workloads.report.report import table

POLICIES = "esp,esp-paper,replicas"
SECONDS = 10.0


def scale_ups(served: Served) -> list[tuple[str, float, float]]:
    """Return policy, rate, and scale-ups in ten seconds."""
    rows = []
    for point in served.points:
        count, duration = point.median("num_scale_ups"), point.median("duration")
        if count is not None and duration:
            rows.append((point.policy, point.rate, SECONDS * count / duration))
    return rows


def frequency_panel(served: Served) -> Panel:
    """Plot scale-ups over rate."""
    lines = lines_of(scale_ups(served))
    return Panel(f"{served.workload}: scale-ups", "requests per second", "in ten seconds", lines)


def main() -> None:
    parser = script_parser("scale_up", __doc__)
    add_serving_flags(parser, POLICIES, ("sharegpt",))
    args = parser.parse_args()
    results = [serve(args, workload) for workload in args.workload]
    panels = [panel for served in results for panel in (attainment_panel(served), frequency_panel(served))]
    write_lines(panels, args.output_dir, "scale_up")
    rows = [(s.workload, *row) for s in results for row in scale_ups(s)]
    print(
        table(
            ("workload", "policy", "req/s", "scale-ups in 10 s"),
            [(workload, policy, f"{rate:.4g}", f"{count:.1f}") for workload, policy, rate, count in rows],
        )
    )
    print("\n" + goodput_table(args, results))
    print_result("scale_up", {**numbers_of(args, results), "scale_ups": rows}, save=args.save)
    end([served.document for served in results])


if __name__ == "__main__":
    main()
