"""Checks that a server under faults loses no request and changes no token, and does not grow.

A server of the tiny model starts with four CPU instances. `loong chaos` sends requests to it, kills and stops
workers, and compares all outputs. Meanwhile the number of instances changes as by `loong scale`, and hostile
clients send what does a server harm. Memory and descriptors of all processes and the KV of all instances are
sampled. At the end no KV may be held. "Growth" is the slope over the last third of the samples. The ceiling
is 0 of everything.
"""

import json
import random
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import linear_regression, mean
from tempfile import TemporaryDirectory

sys.path.append(str(Path(__file__).parents[1] / "support"))

from hostile_clients import KINDS, HostileClients
from result import print_result, script_parser
from server_processes import ProcessUse, child_pid, kv_tokens, processes_of

from loong.launcher.scale.client import OperatedServer, ScaleError
from loong.runs.spawned_server import ENTRY, ServerConfig, spawn_server

KEY = "operators-key"
NUM_INSTANCES, SIZES = 4, (2, 3, 4, 5, 6)
KV_TOKENS = 2048  # of an instance: a request fits into one, and not many do
LOOK_SECONDS = 0.5
REST_SECONDS = 60.0  # for the last change, and for all KV to be free at the end
NUM_ROWS = 16  # of the table


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at a time. Values of workers are means."""

    minutes: float
    num_serving: int
    num_processes: int
    server_mib: float
    worker_mib: float
    server_descriptors: int
    worker_descriptors: float
    kv_tokens: float


class ChangingServer:
    """A server that is sampled, and whose instances are added and removed."""

    def __init__(self, url: str, pid: int) -> None:
        self._url, self._pid, self._operated = url, pid, OperatedServer(url, KEY)
        self._began_at = time.monotonic()
        self.samples: list[Sample] = []
        self.changes: Counter[str] = Counter()

    def sample(self) -> None:
        """Add a sample of now."""
        server, *others = processes_of(self._pid)
        workers = [use for use in others if _is_worker(use)]
        instances = self._operated.size().instances
        self.samples.append(
            Sample(
                minutes=round((time.monotonic() - self._began_at) / 60, 2),
                num_serving=sum(instance.state == "serving" for instance in instances),
                num_processes=1 + len(others),
                server_mib=round(server.memory_mib, 1),
                worker_mib=round(mean(use.memory_mib for use in workers), 1),
                server_descriptors=server.num_descriptors,
                worker_descriptors=round(mean(use.num_descriptors for use in workers), 1),
                kv_tokens=kv_tokens(self._url),
            )
        )

    def change(self, num_instances: int) -> None:
        """Begin to change the number of instances, and count the outcome."""
        try:
            before = self._operated.size().num_instances
            self._operated.scale(num_instances)
        except ScaleError as error:
            self.changes[f"refused: {error}"] += 1
        else:
            self.changes["joins"] += max(0, num_instances - before)
            self.changes["leaves"] += max(0, before - num_instances)

    def rest(self) -> None:
        """Return once the first instances are back, and no KV is held."""
        self.change(NUM_INSTANCES)
        deadline = time.monotonic() + REST_SECONDS
        while not self._operated.size().is_done or kv_tokens(self._url):
            if time.monotonic() > deadline:
                held = kv_tokens(self._url)
                raise SystemExit(f"after {REST_SECONDS:g} s: {self._operated.size()}; {held:g} tokens of KV")
            time.sleep(LOOK_SECONDS)


def _is_worker(use: ProcessUse) -> bool:
    return use.name.startswith("loong-worker")


def follow(server: ChangingServer, chaos: "subprocess.Popen[str]", args: Namespace) -> None:
    """Sample, and change the number of instances, until `loong chaos` has ended."""
    next_sample = next_change = time.monotonic() + args.change_seconds
    while chaos.poll() is None:
        if time.monotonic() >= next_sample:
            server.sample()
            next_sample += args.sample_seconds
        if time.monotonic() >= next_change:
            server.change(random.choice(SIZES))
            next_change += args.change_seconds
        time.sleep(LOOK_SECONDS)


def growth(samples: Sequence[Sample], name: str) -> float:
    """Return the slope of a value an hour."""
    last = samples[2 * len(samples) // 3 :]
    return 60 * linear_regression([s.minutes for s in last], [getattr(s, name) for s in last])[0]


def print_table(samples: Sequence[Sample]) -> None:
    names = ("minutes", "serving", "processes", "server MiB", "worker MiB", "server fds", "worker fds", "KV")
    print("".join(f"{name:>12}" for name in names))
    for sample in (*samples[: -1 : max(1, len(samples) // NUM_ROWS)], samples[-1]):
        print("".join(f"{value:>12,.4g}" for value in astuple(sample)))


def main() -> None:
    parser = script_parser("under_faults", __doc__)
    parser.add_argument("--policy", default="esp", help="policy of the server (%(default)s)")
    parser.add_argument("--duration", default="30m", metavar="TIME", help="time with faults (%(default)s)")
    parser.add_argument("--kill", default="1/20s", metavar="N/TIME", help="rate of SIGKILLs (%(default)s)")
    parser.add_argument("--pause", default="1/4m", metavar="N/TIME", help="rate of SIGSTOPs (%(default)s)")
    parser.add_argument("--request-rate", default="2", metavar="R", help="requests per second (%(default)s)")
    parser.add_argument(
        "--request-timeout",
        default="2m",
        metavar="TIME",
        help="time after which a request without an end counts as lost (%(default)s)",
    )
    parser.add_argument(
        "--change-seconds", type=float, default=45.0, help="seconds between two changes (%(default)s)"
    )
    parser.add_argument(
        "--sample-seconds", type=float, default=30.0, help="seconds between two samples (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the load and the changes (%(default)s)")
    parser.add_argument(
        "--hostile",
        nargs="+",
        choices=(*KINDS, "none"),
        default=list(KINDS),
        help="kinds of hostile clients (all)",
    )
    args = parser.parse_args()
    random.seed(args.seed)
    sizes = ("--max-instances", str(max(SIZES)), "--kv-cache-tokens", str(KV_TOKENS), "--dtype", "float32")
    flags = (*sizes, "--allow-fault-injection", "--admin-key", KEY)
    command = [sys.executable, "-c", ENTRY, "chaos", "--admin-key", KEY, "--json"]
    for name in ("duration", "kill", "pause", "request_rate", "request_timeout", "seed"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    with TemporaryDirectory() as folder:
        config = ServerConfig(None, NUM_INSTANCES, 1, flags, start_timeout=300.0)
        log = Path(folder) / "server.log"
        with spawn_server(config, args.policy, log) as url:
            server = ChangingServer(url, child_pid())
            hostile = HostileClients(url, child_pid(), [kind for kind in args.hostile if kind != "none"])
            with (
                subprocess.Popen([*command, "--base-url", url], stdout=subprocess.PIPE, text=True) as chaos,
                hostile,
            ):
                try:
                    follow(server, chaos, args)
                finally:
                    chaos.terminate()
                assert chaos.stdout is not None
                output = chaos.stdout.read()
            if not output:
                raise SystemExit(log.read_text())
            server.rest()
            server.sample()
    report = json.loads(output.splitlines()[-1])
    grown = {name: round(growth(server.samples, name), 2) for name in MEASURED}
    print("\n".join(output.splitlines()[:-1]))
    print_table(server.samples)
    print(f"changes: {dict(server.changes)}; growth an hour: {grown}")
    print(f"hostile: {dict(hostile.counts)}")
    numbers = {
        "policy": args.policy,
        **{name: value for name, value in report.items() if not isinstance(value, (list, dict))},
        "num_faults": dict(Counter(fault["kind"] for fault in report["faults"])),
        "changes": dict(server.changes),
        "hostile": dict(hostile.counts),
        "growth_per_hour": grown,
        "columns": [field.name for field in fields(Sample)],
        "samples": [astuple(sample) for sample in server.samples],
    }
    print_result("under_faults", numbers, save=args.save)
    raise SystemExit(chaos.returncode)


MEASURED = ("server_mib", "worker_mib", "server_descriptors", "worker_descriptors")


if __name__ == "__main__":
    main()
