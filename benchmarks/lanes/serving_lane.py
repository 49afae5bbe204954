"""Measures attention for other GPUs' queries, layer by layer, while a chunk of a prompt runs.

A served layer waits for its queries, attends them over KV on this GPU, and puts the partials for others to
read; its latency is from the queries to the last partial. A step of 32 served layers is one CUDA graph, with
100 us between layers, as on other GPUs. At the same time run chunks of 8,192 tokens, a graph each, as in a
worker, with dummy weights of Llama-3.1-8B. The ways to share the GPU:

- plain: a second stream
- high: a second stream of high priority; others may be added by "+"
- turns: chunks attend 8,192 keys at a time, or more of few queries, as steps that the host launches while an
  instance serves
- blocks: chunks attend by a kernel of short programs, which cuts the keys of few queries into pieces
- whole, cut: as blocks, but no keys are cut, or all, as in captured steps
- lane-N: green contexts: N multiprocessors for served layers, the others for chunks

Floor of a layer: its KV over the rate of a large copy. First comes the rate at which attention alone reads
KV, by the number of multiprocessors. In all ways products of chunks are computed in parts, as in captured
steps.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lane_steps import LaneModel

sys.path.append(str(Path(__file__).parents[1] / "support"))

from one_gpu import PromptStep
from result import print_result, script_parser
from served_layers import GAP, NUM_LAYERS, Load, ServedKV
from sm_lanes import Lane, LaneDevice, Replay, Stamps, processors_seen, seconds_of, split, times_beside, whole

from loong.model.shapes import find_config

LOADS = ("1x1024", "1x65536", "16x1024", "16x8192", "64x1024", "64x8192")
WAYS = ("plain", "high", "turns", "lane-16", "lane-32", "lane-48")
CUTS = {"blocks": None, "whole": False, "cut": True}
SIZES = (8, 16, 24, 32, 40, 48, 64, 96, 132)
READS = ("16x8192", "128x1024")
HIGH = -1
NUM_CHUNKS, NUM_WARM_UPS = 3, 5
NUM_STEPS = 10  # of served layers alone
STEPS_AT_ONCE = 4  # launched while chunks run
COPY_BYTES = 1 << 32


@dataclass(frozen=True, slots=True)
class Way:
    """A way for chunks and served layers to share the GPU."""

    name: str
    chunks: Lane
    served: Lane


def way_of(name: str, index: int) -> Way:
    """Parse the name of a way."""
    chunks, served = whole(index), whole(index, HIGH)
    for part in name.split("+"):
        kind, _, number = part.partition("-")
        if kind == "plain":
            served = whole(index)
        elif kind == "turns":
            chunks = replace(chunks, in_turns=True)
        elif kind in CUTS:
            chunks = replace(chunks, by_blocks=True, is_cut=CUTS[kind])
        elif kind == "lane":
            served, chunks = split(index, int(number))
        elif kind != "high":
            raise ValueError(f"{name!r} is none of the ways to share a GPU")
    return Way(name, chunks, served)


def copy_rate(device: torch.device) -> float:
    """Return the bytes read and written a second."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target, lane = torch.empty_like(source), whole(device.index)
    stamps = Stamps(device)

    def copy() -> None:
        with torch.cuda.stream(lane.stream):
            target.copy_(source)

    return 2 * COPY_BYTES / median(seconds_of(copy, lane, stamps, 5))


def read_rates(
    kv: ServedKV, sizes: Sequence[int], loads: Sequence[Load], index: int
) -> Iterator[dict[str, float]]:
    """Return the rate of attention by number of multiprocessors."""
    device = torch.device("cuda", index)
    stamps, most = Stamps(device), whole(index).num_processors
    print(
        "".join(
            f"{name:>10}" for name in ("SMs", "of which", *(f"{x.num_requests}x{x.context}" for x in loads))
        )
    )
    for size in sizes:
        lane = whole(index) if size >= most else split(index, size)[0]
        row: dict[str, float] = {"processors": lane.num_processors, "seen": processors_seen(lane, device)}
        for load in loads:
            replay = kv.captured(load, lane, gap=0)
            seconds = median(seconds_of(replay, lane, stamps, 5)) / NUM_LAYERS
            row[f"{load.num_requests}x{load.context}"] = load.num_bytes(kv.config) / seconds
        shown = "".join(f"{value / 1e12:>10.2f}" for value in list(row.values())[2:])
        print(f"{lane.num_processors:>10}{row['seen']:>10}{shown}", flush=True)
        yield row


class Bench:
    """Chunks and served layers on one GPU; `chunk_seconds` are those of a chunk alone."""

    def __init__(self, model: LaneModel, kv: ServedKV, chunk: PromptStep) -> None:
        self._model, self._kv, self._chunk = model, kv, chunk
        self._device = model.pool.device
        self._stamps = Stamps(self._device)
        lane = whole(self._device.index)
        replay = model.captured(chunk, lane)
        seconds_of(replay, lane, self._stamps, NUM_WARM_UPS)
        self.chunk_seconds = median(seconds_of(replay, lane, self._stamps, 2 * NUM_CHUNKS))

    def rows(self, way: Way, loads: Sequence[Load]) -> Iterator[dict[str, object]]:
        """Yield the rows of all loads, in one way."""
        replay = self._model.captured(self._chunk, way.chunks)
        alone = median(seconds_of(replay, way.chunks, self._stamps, NUM_CHUNKS))
        seen = processors_seen(way.served, self._device), processors_seen(way.chunks, self._device)
        error = self._kv.error(loads[0], way.served)
        for load in loads:
            served = self._kv.captured(load, way.served)
            yield {
                "way": way.name,
                "processors": way.served.num_processors,
                "seen": seen,
                "error": error,
                "requests": load.num_requests,
                "context": load.context,
                "bytes": load.num_bytes(self._kv.config),
                "chunk_alone": alone,
                **self._measured(way, replay, served),
            }

    def _measured(self, way: Way, chunk: Replay, served: Replay) -> dict[str, object]:
        """Measure a served load alone, and with chunks, of which the first does not count."""
        self._kv.reset()
        seconds_of(served, way.served, self._stamps, NUM_STEPS)
        served_alone = self._kv.latencies()
        self._kv.reset()

        def serve() -> None:
            for _ in range(STEPS_AT_ONCE):
                served()
            way.served.stream.synchronize()

        times = times_beside(chunk, way.chunks, self._stamps, 1 + NUM_CHUNKS, serve)
        chunks = [(later - earlier) * 1e-9 for earlier, later in pairwise(times)]
        return {
            "alone": asdict(served_alone),
            "beside": asdict(self._kv.latencies(times[0], times[-1])),
            "chunk_beside": median(chunks),
        }


def print_rows(rows: Iterable[dict[str, Any]], chunk_seconds: float, rate: float) -> list[dict[str, Any]]:
    """Print the table as it comes: microseconds of served layers, and the slowdown of chunks."""
    names = (
        "way",
        "requests",
        "context",
        "floor",
        "alone",
        "mean",
        "p50",
        "p99",
        "worst",
        "reads",
        "chunk",
        "beside",
    )
    print("".join(f"{name:>10}" for name in names))
    table = list[dict[str, Any]]()
    for row in rows:
        if not table or table[-1]["way"] != row["way"]:
            served, chunks = row["seen"]
            print(f"{row['way']}: {served} and {chunks} multiprocessors seen, off by {row['error']:.1e}")
        alone, beside = row["alone"], row["beside"]
        times = (
            row["bytes"] / rate,
            alone["mean"],
            *(beside[name] for name in ("mean", "median", "p99", "worst")),
        )
        busy = row["bytes"] / rate / (beside["mean"] + GAP * 1e-9) if beside["number"] else 0.0
        longer = (row[name] / chunk_seconds - 1 for name in ("chunk_alone", "chunk_beside"))
        shown = "".join(f"{value:>10}" for value in ("", row["requests"], row["context"]))
        shown += "".join(f"{time * 1e6:>10.1f}" for time in times)
        print(shown + "".join(f"{share:>10.1%}" for share in (busy, *longer)), flush=True)
        table.append(row)
    return table


def main() -> None:
    parser = script_parser("serving_lane", __doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="a built-in shape (%(default)s)")
    parser.add_argument("--ways", nargs="*", default=WAYS, help="(%(default)s)")
    parser.add_argument("--loads", nargs="*", default=LOADS, help="REQUESTSxCONTEXT (%(default)s)")
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES, help="multiprocessors (%(default)s)")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens (%(default)s)")
    parser.add_argument("--history", type=int, default=0, help="tokens before the chunk (%(default)s)")
    args = parser.parse_args()
    index = 0
    torch.cuda.set_device(index)
    loads, reads = list(map(Load.parsed, args.loads)), list(map(Load.parsed, READS))
    device, config = torch.device("cuda", index), find_config(args.model, "dummy")
    rate = copy_rate(device)
    print(f"{torch.cuda.get_device_name(index)}: a copy moves {rate / 1e12:.2f} TB/s, read and written")
    kv = ServedKV(config, max(load.num_tokens for load in (*loads, *reads)), device)
    read = list(read_rates(kv, args.sizes, reads, index))
    lane = whole(index)
    model = LaneModel(args.model, args.history + args.chunk, LaneDevice(index, config.torch_dtype, lane))
    bench = Bench(model, kv, PromptStep(args.chunk, args.history, 0, 0))
    print(f"a chunk alone takes {bench.chunk_seconds * 1e3:.1f} ms")
    rows = (row for name in args.ways for row in bench.rows(way_of(name, index), loads))
    numbers = {
        "gpu": torch.cuda.get_device_name(index),
        "model": args.model,
        "torch": torch.__version__,
        "chunk": [args.chunk, args.history],
        "copy_rate": rate,
        "chunk_seconds": bench.chunk_seconds,
        "read_rates": read,
        "rows": print_rows(rows, bench.chunk_seconds, rate),
    }
    print_result("serving_lane", numbers, save=args.save)


if __name__ == "__main__":
    main()
