"""The host tier: sessions of agents with little room for KV, and a second question about a long document.

Both are simulated with and without host memory. Sessions wait for their answers, so those that end sooner ask
more. The two questions about a document come with enough others between them that its KV leaves the device.
They come once more where the device has room for all.
Needs no device.

    python benchmarks/evaluation/host_tier.py                                   # some minutes
"""

import argparse
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.hardware.model_shape import shape_of
from loong.model.shapes import find_config
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy
from loong.simulation.cluster import Hardware
from loong.simulation.config import Load, SimulatedLoadConfig
from loong.simulation.run import SimulatedRun, simulate
from loong.workloads.metrics.metrics import compute_metrics
from loong.workloads.metrics.slo import parse_slo
from loong.workloads.report.report import table
from loong.workloads.request import RequestShape, TokenRun, WorkloadRequest

MODEL, DEVICE = "llama-3.1-8b", "h200"
LIMITS = parse_slo("ttft:600000 tpot:1000").limits_of(None)
NUM_BETWEEN = 4  # other documents
LITTLE_ROOM, MUCH_ROOM = 2, NUM_BETWEEN + 2  # documents
GAP = 60.0  # seconds between two requests, so that each has the instance to itself


@dataclass(frozen=True, slots=True)
class Sessions:
    """Agents under one size of host memory; times are in milliseconds."""

    host_kv_tokens: int
    num_requests: int
    hit_rate: float | None
    ttft_median: float
    ttft_p99: float
    seconds: float
    num_offloaded_tokens: int
    num_loaded_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Document:
    """The times to the first token of two questions about a document, in milliseconds."""

    kv_cache_tokens: int
    host_kv_tokens: int
    num_tokens: int
    first: float
    second: float
    num_cached_tokens: int


def hardware(kv_cache_tokens: int, host_kv_tokens: int, num: int) -> Hardware:
    """Return instances with room on the device and in host memory."""
    shape = shape_of(find_config(MODEL, "dummy"))
    return Hardware(shape, DEVICE, num, kv_cache_tokens=kv_cache_tokens, host_kv_tokens=host_kv_tokens)


def run(found: Hardware, load: Load) -> SimulatedRun:
    """Simulate a load under the default policy."""
    return simulate(make_policy("esp", PolicyConfig()), found.cluster("esp"), load, LIMITS)


def sessions(args: argparse.Namespace, host_kv_tokens: int) -> Sessions:
    """Simulate agents."""
    load = SimulatedLoadConfig("agents", args.seed, args.num_requests).at(args.rate)
    found = hardware(args.kv_cache_tokens, host_kv_tokens, args.num_instances)
    result = run(found, load)
    metrics = compute_metrics(result.records, LIMITS)
    ttft = metrics.latencies.ttft
    assert ttft is not None, "none has completed"
    return Sessions(
        host_kv_tokens,
        len(result.records),
        metrics.hit_rate,
        ttft["median"] * 1e3,
        ttft["p99"] * 1e3,
        result.end,
        result.stats.num_offloaded_tokens,
        result.stats.num_loaded_tokens,
        result.stats.num_preemptions,
    )


def document(args: argparse.Namespace, num_documents: int, host_kv_tokens: int) -> Document:
    """Simulate two questions about a document, with others between them, on a device with room for some."""
    num_tokens = args.document_tokens
    seeds = [0, *range(1, NUM_BETWEEN + 1), 0]
    sent = [
        WorkloadRequest(
            GAP * number, RequestShape((TokenRun(seed, num_tokens), TokenRun(100 + number, 50)), 20)
        )
        for number, seed in enumerate(seeds)
    ]
    kv_cache_tokens = num_documents * num_tokens
    result = run(hardware(kv_cache_tokens, host_kv_tokens, 1), Load(sent))
    first, second = result.records[0], result.records[-1]
    assert second.usage is not None, "it has completed"
    cached = second.usage.num_cached_tokens or 0
    return Document(kv_cache_tokens, host_kv_tokens, num_tokens, first.ttft * 1e3, second.ttft * 1e3, cached)


def main() -> None:
    parser = script_parser("host_tier", __doc__)
    parser.add_argument("--rate", type=float, default=4.0, help="requests of agents per second (%(default)s)")
    parser.add_argument("--num-requests", type=int, default=600, help="of agents (%(default)s)")
    parser.add_argument("--num-instances", type=int, default=2, help="for agents (%(default)s)")
    parser.add_argument("--kv-cache-tokens", type=int, default=200_000, help="for agents (%(default)s)")
    parser.add_argument("--host-kv-tokens", type=int, default=2_000_000, help="an instance (%(default)s)")
    parser.add_argument("--document-tokens", type=int, default=100_000, help="of a document (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (%(default)s)")
    args = parser.parse_args()
    rooms = ((LITTLE_ROOM, 0), (LITTLE_ROOM, args.host_kv_tokens), (MUCH_ROOM, 0))
    documents = [document(args, *room) for room in rooms]
    rows = [
        (
            f"{d.kv_cache_tokens:,}",
            f"{d.host_kv_tokens:,}",
            f"{d.first:.0f}",
            f"{d.second:.0f}",
            f"{d.second / d.first:.1%}",
            f"{d.num_cached_tokens:,}",
        )
        for d in documents
    ]
    print(table(("device KV", "host KV", "first ms", "second ms", "share", "cached"), rows), flush=True)
    agents = [sessions(args, num_tokens) for num_tokens in (0, args.host_kv_tokens)]
    more = [
        (
            f"{s.host_kv_tokens:,}",
            "-" if s.hit_rate is None else f"{s.hit_rate:.1%}",
            f"{s.ttft_median:.0f}",
            f"{s.ttft_p99:.0f}",
            f"{s.seconds:.0f}",
            f"{s.num_offloaded_tokens:,}",
            f"{s.num_loaded_tokens:,}",
        )
        for s in agents
    ]
    print(table(("host KV", "hits", "TTFT p50 ms", "TTFT p99 ms", "s", "offloaded", "loaded"), more))
    numbers = {"documents": list(map(asdict, documents)), "sessions": list(map(asdict, agents))}
    print_result("host_tier", {"command": shlex.join(["python", *sys.argv]), **numbers}, save=args.save)


if __name__ == "__main__":
    main()
