"""Measures the cost of a lost instance, and the time until instances are seen to be lost or have work again.

A server has four CPU instances of a small random model, and all that are there compute each prompt (DoP 4).
A worker is killed when half and when nine tenths of a prompt are computed. "Recomputed" is the share of the
prompt's tokens whose KV was computed again: the ceiling is a quarter. "Time" is against the same prompt
undisturbed, in turns with it. Times of losses and joins come from the server's decision log. Joins by `loong
scale` are measured between streams that use all instances.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from threading import Event, Thread
from urllib.request import Request, urlopen

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser
from server_processes import kv_tokens, metric
from trials import History, Row, print_table

from loong.launcher.scale.client import OperatedServer
from loong.runs.spawned_server import ServerConfig, spawn_server

KEY = "operators-key"
DOP = 4
MOMENTS = (0.5, 0.9)  # shares of the tokens of a prompt that are computed then
WAIT_SECONDS = 60.0
LOOK_SECONDS = 0.02
NUM_STREAMS, NUM_OUTPUT = 2, 4  # short ones: a lease that runs does not end for an instance that joins
BETWEEN_SECONDS = 3.0  # an instance whose kills are 10 s apart starts again at once
RECOMPUTED = "loong:recomputed_tokens_total"


class LossyServer:
    """A server whose workers are killed, and what its decision log says about it."""

    def __init__(self, url: str, log: Path) -> None:
        self.url, self._log, self._operated = url, log, OperatedServer(url, KEY)
        self._random = Random(0)

    def complete(self, num_prompt: int, num_output: int = 1) -> float:
        """Return the seconds of a completion of random tokens."""
        prompt = [self._random.randrange(3, 250) for _ in range(num_prompt)]
        begin = time.monotonic()
        self._post("/v1/completions", {"prompt": prompt, "max_tokens": num_output, "ignore_eos": True})
        return time.monotonic() - begin

    def kill(self) -> float:
        """Kill a worker, and return the time at which it was asked for."""
        begin = time.time()
        self._post("/admin/faults", {"fault": "kill"})
        return begin

    def kill_at(self, num_tokens: float) -> None:
        """Kill a worker once this number of tokens of KV is held."""
        while kv_tokens(self.url) < num_tokens:
            time.sleep(LOOK_SECONDS)
        self.kill()

    def scale(self, num_instances: int) -> float:
        """Begin to change the number of instances, and return the time at which it was asked for."""
        begin = time.time()
        self._operated.scale(num_instances)
        return begin

    def wait(self, num_instances: int) -> None:
        """Return once this number of instances serve."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            states = [instance.state for instance in self._operated.size().instances]
            if states == ["serving"] * num_instances:
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"after {WAIT_SECONDS:g} s, instances are {states}")
            time.sleep(LOOK_SECONDS)

    def history(self) -> "History":
        """Return the history so far."""
        return History(self._log)

    def _post(self, path: str, body: Mapping[str, object]) -> None:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        request = Request(f"{self.url}{path}", json.dumps(body).encode(), headers)
        with urlopen(request, timeout=WAIT_SECONDS) as answer:
            answer.read()


@contextmanager
def spawned(policy: str, max_instances: int, num_kv_tokens: int) -> Iterator[LossyServer]:
    """Start a server of four instances. Its policy uses all that are there for each request."""
    with TemporaryDirectory() as folder:
        log = Path(folder) / "decisions.jsonl"
        sizes = ("--max-instances", str(max_instances), "--kv-cache-tokens", str(num_kv_tokens))
        faults = ("--allow-fault-injection", "--admin-key", KEY, "--decision-log", str(log))
        config = ServerConfig(None, DOP, 1, (*sizes, *faults), start_timeout=300.0)
        with spawn_server(config, policy, Path(folder) / "server.log") as url:
            yield LossyServer(url, log)


def prompts(server: LossyServer, num_tokens: int, num_trials: int) -> Iterator[Row]:
    """Yield the costs of a kill for a prompt."""
    server.complete(num_tokens)
    undisturbed: list[float] = []
    times, shares = (defaultdict[float, list[float]](list) for _ in range(2))
    for _ in range(num_trials):
        for moment in MOMENTS:
            undisturbed.append(server.complete(num_tokens))
            before = metric(server.url, RECOMPUTED)
            killer = Thread(target=server.kill_at, args=(moment * num_tokens,))
            killer.start()
            times[moment].append(server.complete(num_tokens) / undisturbed[-1])
            killer.join()
            server.wait(DOP)
            shares[moment].append((metric(server.url, RECOMPUTED) - before) / num_tokens)
    yield Row("prompt, seconds", undisturbed)
    for moment in MOMENTS:
        yield Row(f"time, killed at {moment:g}", times[moment])
        yield Row(f"recomputed, killed at {moment:g}", shares[moment])


def instances(server: LossyServer, num_trials: int) -> Iterator[Row]:
    """Yield the seconds of losses and joins, while streams use all instances."""
    is_over = Event()

    def ask() -> None:
        while not is_over.is_set():
            server.complete(16, NUM_OUTPUT)

    kills, scales = [], []
    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(ask) for _ in range(NUM_STREAMS)]
        for _ in range(num_trials):
            kills.append(server.kill())
            time.sleep(BETWEEN_SECONDS)
            server.wait(DOP)
        for _ in range(num_trials):
            scales.append(server.scale(DOP + 1))
            time.sleep(BETWEEN_SECONDS)
            server.wait(DOP + 1)
            server.scale(DOP)
            server.wait(DOP)
        is_over.set()
        for future in asking:
            future.result()
    history = server.history()
    found = [history.after(kill) for kill in kills]
    yield Row("kill to loss, seconds", [lost for lost, _, _ in found if lost is not None])
    yield Row("kill to first batch, seconds", [began for _, _, began in found])
    yield Row("loong scale to join, seconds", [joined for _, joined, _ in map(history.after, scales)])
    yield Row("loong scale to first batch, seconds", [began for _, _, began in map(history.after, scales)])


def main() -> None:
    parser = script_parser("losses", __doc__)
    parser.add_argument("--prompt-tokens", type=int, default=16384, help="length of a prompt (%(default)s)")
    parser.add_argument("--trials", type=int, default=10, help="number of trials of each kind (%(default)s)")
    args = parser.parse_args()
    with spawned("esp-fixed-4", DOP, args.prompt_tokens) as server:
        rows = [*prompts(server, args.prompt_tokens, args.trials)]
    with spawned("static-sp", DOP + 1, args.prompt_tokens) as server:
        rows += instances(server, args.trials)
    print_table(rows)
    values = {row.what: [round(value, 4) for value in row.values] for row in rows}
    print_result("losses", {"prompt_tokens": args.prompt_tokens, **values}, save=args.save)


if __name__ == "__main__":
    main()
