"""Compares predicted with measured steps of servers, and whole runs, all over HTTP.

`loong bench` starts a server for each policy. It plans by the cost model as it is, and learns nothing from
its own steps. The decision log has the measured and the predicted seconds of each step; errors are by kinds
of batches, as in `prediction_errors.py`. `loong simulate` runs the same load in virtual time. The seconds
until all requests were done are printed for both.

    python benchmarks/evaluation/predictions.py llama-3.1-8b --num-instances 2 --output-dir out
"""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / name) for name in ("support", "scheduling")]

from loong_runs import Document, end, run_loong
from prediction_errors import by_kind, error_table, errors_of
from result import print_result, script_parser


def all_done_after(document: Document, policy: str) -> float | None:
    """Return the seconds from the start of the load to its last token; None where the run was not made."""
    return next((run["duration"] for run in document["runs"] if run["policy"] == policy), None)


def main() -> None:
    parser = script_parser("predictions", __doc__)
    parser.add_argument("model")
    parser.add_argument("--policy", default="esp,replicas", help="policies to run (%(default)s)")
    parser.add_argument("--num-instances", default="2", help="(%(default)s)")
    parser.add_argument("--device", default="cuda", help="(%(default)s)")
    parser.add_argument("--simulated-device", default="h100", help="(%(default)s)")
    parser.add_argument("--workload", default="zipf(1.0,2000,60000)", help="(%(default)s)")
    parser.add_argument("--length-scale", default="1", help="(%(default)s)")
    parser.add_argument("--request-rate", default="3", help="requests per second (%(default)s)")
    parser.add_argument("--num-requests", default="90", help="(%(default)s)")
    parser.add_argument("--slo", default="tight", help="(%(default)s)")
    parser.add_argument("--extra-server-args", default="", help="more flags of the servers")
    parser.add_argument("--output-dir", type=Path, required=True)
    args = parser.parse_args()
    load = [
        *("--model", args.model, "--num-instances", args.num_instances, "--workload", args.workload),
        *("--length-scale", args.length_scale, "--num-requests", args.num_requests, "--slo", args.slo),
    ]
    rows, documents = {}, []
    for policy in args.policy.split(","):
        folder = args.output_dir / policy
        log = folder / "decisions.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        extra = f"--no-recalibrate --decision-log {log} {args.extra_server_args}"
        measured = run_loong(
            "bench",
            [
                *load,
                *("--policy", policy, "--device", args.device, "--load-format", "dummy"),
                *("--request-rate", args.request_rate, f"--extra-server-args={extra}"),
            ],
            folder / "measured",
        )
        simulated = run_loong(
            "simulate",
            [*load, "--policy", policy, "--device", args.simulated_device, "--rate", args.request_rate],
            folder / "simulated",
        )
        documents.append(measured)
        times = [all_done_after(document, policy) for document in (measured, simulated)]
        errors = by_kind(errors_of(log))
        rows[policy] = {"all_done_after": times[0], "simulated": times[1], "errors": errors}
        print(f"{policy}: all done after {times[0]} s, simulated {times[1]} s")
        print(error_table(errors))
    print_result("predictions", {"policies": rows}, save=args.save)
    end(documents)


if __name__ == "__main__":
    main()
