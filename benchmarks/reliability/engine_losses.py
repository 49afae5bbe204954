"""Kills workers and engines of a server under load, and compares what a loss costs.

Servers of the tiny model with four CPU instances, planned for by one engine, two and four, get requests of
`loong chaos`. With one engine workers are killed, with several engines and workers. `recovery` is the longest
time in which an open stream waited for its next token after a fault, by kind of fault. The ceiling is no
request lost and no token lost, repeated or changed.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.runs.spawned_server import ENTRY, ServerConfig, spawn_server

NUM_INSTANCES = 4
FLAGS = ("--kv-cache-tokens", "4096", "--dtype", "float32", "--allow-fault-injection")
NUMBERS = (
    *("num_requests", "num_complete_requests", "num_failed_requests", "num_lost_requests", "num_tokens"),
    *("num_lost_tokens", "num_repeated_tokens", "num_changed_tokens", "num_instance_losses"),
    *("num_engine_losses", "num_taken_over_requests", "health"),
)


def run(num_engines: int, duration: str, rate: str, faults: tuple[str, ...]) -> dict[str, object]:
    """Return the numbers of a run."""
    engines = () if num_engines == 1 else ("--num-engines", str(num_engines))
    with TemporaryDirectory() as folder:
        config = ServerConfig(None, NUM_INSTANCES, 1, (*FLAGS, *engines), start_timeout=300.0)
        with spawn_server(config, "esp", Path(folder) / "server.log") as url:
            command = [sys.executable, "-c", ENTRY, "chaos", "--base-url", url, "--json", *faults]
            command += ["--duration", duration, "--request-rate", rate]
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
    report = json.loads(output.splitlines()[-1])
    waits: dict[str, list[float]] = {}
    for fault in report["faults"]:
        if fault["recovery"] is not None:
            waits.setdefault(fault["kind"], []).append(fault["recovery"])
    return {
        "num_engines": num_engines,
        **{name: report[name] for name in NUMBERS},
        "num_faults": dict(Counter(fault["kind"] for fault in report["faults"])),
        "median_recovery": {kind: round(median(seconds), 2) for kind, seconds in waits.items()},
        "longest_recovery": {kind: round(max(seconds), 2) for kind, seconds in waits.items()},
    }


def main() -> None:
    parser = script_parser("engine_losses", __doc__)
    parser.add_argument("--duration", default="60s", metavar="TIME", help="time with faults (%(default)s)")
    parser.add_argument("--kill", default="1/10s", metavar="N/TIME", help="rate of faults (%(default)s)")
    parser.add_argument("--request-rate", default="2", metavar="R", help="requests a second (%(default)s)")
    args = parser.parse_args()
    workers, engines = ("--kill", args.kill), ("--kill-engine", args.kill)
    runs = []
    for num_engines, faults in ((1, workers), (2, engines), (4, (*engines, *workers))):
        runs.append(run(num_engines, args.duration, args.request_rate, faults))
        print(json.dumps(runs[-1], indent=2))
    print_result("engine_losses", {"runs": runs}, save=args.save)


if __name__ == "__main__":
    main()
