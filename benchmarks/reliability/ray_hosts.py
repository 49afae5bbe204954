"""Measures the loss of a whole host of a Ray cluster, and the time until another one has work.

Four Ray nodes run on this machine at loopback addresses, each with one CPU instance of the tiny model. All
instances that are there compute each request. Every node but the head's is killed once with all its
processes during a stream, and is started again. The tokens must be those of an undisturbed request. Times of
losses and joins come from the server's decision log. Most of them are Python's imports, on few processors.
Needs `pip install '.[ray]'`.
"""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import httpx

sys.path.append(str(Path(__file__).parents[1] / "support"))
sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

from ray_nodes import HEAD, RayNodes, ray_nodes
from result import print_result, script_parser
from served import Served
from trials import History, Row, print_table

OTHERS = ("127.0.0.3", "127.0.0.4", "127.0.0.5")
SIZES = ("--kv-cache-tokens", "2048", "--dtype", "float32", "--policy", "static-sp")
NUM_TOKENS, NUM_SHORT = 400, 4  # a lease that runs does not end for an instance that joins
WAIT_SECONDS = 300.0
LOOK_SECONDS = 0.02
LOG = "decisions.jsonl"


@dataclass(frozen=True, slots=True)
class Trial:
    """The Unix times at which a node was killed and started, and seconds until effects of both."""

    killed_at: float
    degraded: float
    longest_wait: float
    started_at: float
    node: float

    def seconds(self, history: History) -> dict[str, float]:
        """Return all seconds by what they are, also those of the decision log."""
        lost, _, _ = history.after(self.killed_at)
        _, joined, began = history.after(self.started_at)
        assert lost is not None
        return {
            "kill to loss": lost,
            "kill to degraded": self.degraded,
            "longest wait of the stream": self.longest_wait,
            "ray start to a node": self.node,
            "node to join": joined - self.node,
            "join to first batch": began - joined,
        }


def stream(server: Served, num_tokens: int = NUM_TOKENS) -> Iterator[str]:
    """Yield the pieces of a greedy output."""
    chunks = server.client.completions.create(
        model="loong-tiny",
        prompt="once",
        max_tokens=num_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return (chunk.choices[0].text for chunk in chunks)


def wait_for(server: Served, status: str, begin: float) -> float:
    """Return the seconds from `begin` until the server's health has a status."""
    while httpx.get(f"{server.url}/health", timeout=WAIT_SECONDS).json()["status"] != status:
        if time.time() > begin + WAIT_SECONDS:
            raise SystemExit(f"not {status} after {WAIT_SECONDS:g} s:\n{server.log}")
        time.sleep(LOOK_SECONDS)
    return time.time() - begin


@contextmanager
def asked_for_tokens(server: Served) -> Iterator[None]:
    """Stream in the background until the context ends."""
    is_over = Event()

    def ask() -> None:
        while not is_over.is_set():
            list(stream(server, NUM_SHORT))

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        yield
        is_over.set()
        asking.result()


def lose_and_add(server: Served, nodes: RayNodes, address: str) -> Trial:
    """Lose a node during a stream, and add it again."""
    expected, pieces = "".join(stream(server)), stream(server)
    text, killed_at = next(pieces), time.time()
    nodes.lose(address)
    with ThreadPoolExecutor(1) as pool:
        degraded = pool.submit(wait_for, server, "degraded", killed_at)
        text += next(pieces)
        waits = [time.time()]
        for piece in pieces:
            text += piece
            waits.append(time.time())
    if text != expected:
        raise SystemExit(f"the tokens have changed: {text!r} instead of {expected!r}")
    longest = max(later - earlier for earlier, later in zip([killed_at, *waits], waits, strict=False))
    with asked_for_tokens(server):
        started_at = time.time()
        nodes.add(address)
        node = time.time() - started_at
        wait_for(server, "ok", started_at)
    list(stream(server, NUM_SHORT))
    return Trial(killed_at, degraded.result(), longest, started_at, node)


def main() -> None:
    parser = script_parser("ray_hosts", __doc__)
    args = parser.parse_args()
    with TemporaryDirectory() as path, ray_nodes() as nodes:
        folder = Path(path)
        nodes.add(HEAD, *OTHERS)
        flags = ("--num-hosts", "4", "--num-instances", "4", *SIZES, "--decision-log", LOG)
        with nodes.served(folder, *flags) as server:
            trials = [lose_and_add(server, nodes, address) for address in OTHERS]
        history = History(folder / LOG)
    seconds = [trial.seconds(history) for trial in trials]
    rows = [Row(f"{what}, seconds", [found[what] for found in seconds]) for what in seconds[0]]
    print_table(rows)
    numbers = {row.what: [round(value, 3) for value in row.values] for row in rows}
    print_result("ray_hosts", numbers, save=args.save)


if __name__ == "__main__":
    main()
