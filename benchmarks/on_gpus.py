"""Every policy on real instances, and the same requests in virtual time: how many meet their SLO?

Predicts with `loong simulate`, then measures with `loong bench`, which starts a server for each policy: the
same engine, kernels and requests, only the policy differs. Weights are dummies, which take as long as real
ones. Writes both documents, a table, and attainment over rate, measured and simulated over each other.

    python benchmarks/on_gpus.py --num-instances 2                       # GPUs; 8 minutes on two H200s
    python benchmarks/on_gpus.py --device cpu --length-scale 1/64 --request-rate 4,8 --num-requests 40 \
        --policy esp,static-sp --cost-model benchmarks/results/cost_model_loong-tiny_cpu.json
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from line_picture import Line, Panel, lines_of, write_lines
from loong_runs import Document, Point, end, points_of, run_loong, server_arguments, shared_arguments
from result import print_result, script_parser

from loong.workloads.report import table

# Those that matter most come first: a run that is stopped early has them.
POLICIES = "esp,static-sp,replicas,chunked,tp,disaggregated,esp-paper"
TTFT, TPOT = "mean_ttft_ms", "mean_tpot_ms"


def simulated(args: argparse.Namespace) -> Document:
    """What the simulator says of the same requests."""
    arguments = [*shared_arguments(args, args.workload), "--request-rate", args.request_rate]
    if args.cost_model is not None:
        arguments += ["--cost-model", str(args.cost_model)]
    else:
        arguments += ["--device", args.simulated_device]
    if args.device == "cpu":
        arguments += ["--num-cores", str(len(os.sched_getaffinity(0)))]
    return run_loong("simulate", arguments, args.output_dir / "simulated")


def measured(args: argparse.Namespace) -> Document:
    """What the servers do."""
    more = [] if args.cost_model is None else ["--cost-model", str(args.cost_model)]
    arguments = [*shared_arguments(args, args.workload), "--request-rate", args.request_rate]
    return run_loong("bench", [*arguments, *server_arguments(args, more)], args.output_dir / "measured")


def comparison(real: Sequence[Point], virtual: Sequence[Point]) -> list[dict[str, object]]:
    """Each policy and rate, measured and, if it was simulated too, in virtual time."""
    by_key = {(point.policy, point.rate): point for point in virtual}
    rows = []
    for point in real:
        twin = by_key.get((point.policy, point.rate))
        rows.append(
            {
                "policy": point.policy,
                "rate": point.rate,
                "attainment": point.attainment,
                "simulated_attainment": None if twin is None else twin.attainment,
                TTFT: point.median(TTFT),
                f"simulated_{TTFT}": None if twin is None else twin.median(TTFT),
                TPOT: point.median(TPOT),
                f"simulated_{TPOT}": None if twin is None else twin.median(TPOT),
                "failed": point.median("failed"),
            }
        )
    return rows


def table_of(rows: Sequence[dict[str, object]]) -> str:
    """Measured beside simulated."""
    header = (
        "policy",
        "req/s",
        "SLO %",
        "simulated",
        "TTFT ms",
        "simulated",
        "TPOT ms",
        "simulated",
        "failed",
    )

    def cells(row: dict[str, object]) -> tuple[str, ...]:
        shares = (_shown(row[key], 100.0) for key in ("attainment", "simulated_attainment"))
        times = (_shown(row[key]) for name in (TTFT, TPOT) for key in (name, f"simulated_{name}"))
        return (str(row["policy"]), f"{row['rate']:g}", *shares, *times, _shown(row["failed"]))

    return table(header, [cells(row) for row in rows])


def _shown(value: object, factor: float = 1.0) -> str:
    return f"{value * factor:.1f}" if isinstance(value, int | float) else "-"


def lines(points: Sequence[Point], suffix: str) -> dict[str, Line]:
    """Attainment over rate of every policy, in percent."""
    return lines_of((f"{p.policy}{suffix}", p.rate, 100 * p.attainment) for p in points)


def main() -> None:
    parser = script_parser("on_gpus", __doc__)
    parser.add_argument("--policy", default=POLICIES, help="(%(default)s)")
    parser.add_argument("--model", help="(llama-3.1-8b, and on CPUs the built-in tiny one)")
    parser.add_argument("--device", default="cuda", help="of the servers (%(default)s)")
    parser.add_argument("--simulated-device", default="h200", help="whose roofline predicts (%(default)s)")
    parser.add_argument("--cost-model", type=Path, help="from `loong profile`, for both (the roofline)")
    parser.add_argument("--num-instances", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--workload", default="mixed", help="(%(default)s)")
    parser.add_argument("--length-scale", default="1/8", help="prompts up to 62,000 tokens (%(default)s)")
    parser.add_argument("--num-requests", type=int, default=80, help="at each rate (%(default)s)")
    parser.add_argument("--request-rate", default="6,12", help="rates (%(default)s)")
    parser.add_argument("--repeat", type=int, default=1, help="of the measured runs (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--slo", default="tight", help="(%(default)s)")
    parser.add_argument("--extra-server-args", default="", help="for `loong serve`, as one word")
    parser.add_argument("--output-dir", type=Path, default=Path("on_gpus"), help="(%(default)s)")
    args = parser.parse_args()
    if args.model is None and args.device == "cuda":
        args.model = "llama-3.1-8b"
    virtual = points_of(simulated(args))
    document = measured(args)
    real = points_of(document)
    rows = comparison(real, virtual)
    print(table_of(rows))
    panel = Panel(
        f"{args.workload} x {args.length_scale}, {args.num_instances} instances, {args.slo}",
        "requests per second",
        "SLO attainment (%)",
        {**lines(real, ""), **lines(virtual, ", simulated")},
        level=90.0,
    )
    written = write_lines([panel], args.output_dir, "attainment")
    print(f"Wrote {', '.join(map(str, written))}")
    print_result(
        "on_gpus",
        {
            "model": args.model,
            "device": args.device,
            "num_instances": args.num_instances,
            "workload": args.workload,
            "length_scale": args.length_scale,
            "num_requests": args.num_requests,
            "slo": args.slo,
            "rows": rows,
        },
        save=args.save,
    )
    end([document])


if __name__ == "__main__":
    main()
