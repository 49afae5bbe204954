"""Measures decodes in a lane of their own while chunks of a prompt run on the same GPU.

Decode steps and chunks of 8,192 tokens are a graph each, with dummy weights of Llama-3.1-8B. With lanes
(green contexts), N multiprocessors decode and the others compute chunks. In mixed steps, a chunk and all
decodes are one graph. It compares both by the time between tokens and the tokens of chunks a second. The last
table has the tokens of chunks a second if no step may take longer than a target. The target limits the chunks
of mixed steps. The host's work between steps is in neither. Floor of a decode step: weights and KV over the
rate of a copy.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lane_steps import LaneModel

sys.path.append(str(Path(__file__).parents[1] / "support"))

from one_gpu import Floors, PromptStep
from result import print_result, script_parser
from serving_lane import Way, copy_rate, way_of
from sm_lanes import LaneDevice, Stamps, seconds_of, times_beside, whole

CHATS, CONTEXT = (32, 128), 1024
WAYS = ("high", "turns", "lane-16", "lane-24", "lane-32", "lane-48", "lane-64")
SIZES = (
    16,
    64,
    128,
    256,
    384,
    512,
    768,
    1024,
    1536,
    2048,
    3072,
    4096,
    8192,
)  # tokens of a chunk in a mixed step
TARGETS = (0.050, 0.025, 0.015, 0.010, 0.008)
CHUNK = 8192
HISTORY = CHUNK // 2  # of a chunk in a mixed step, so that its queries attend as many keys
NUM_CHUNKS, NUM_STEPS = 4, 20


class Bench:
    """Steps on one GPU, which is kept warm."""

    def __init__(self, model: LaneModel, index: int) -> None:
        self._model, self._index, self._stamps = model, index, Stamps(torch.device("cuda", index))
        lane = whole(index)
        replay = model.captured(PromptStep(CHUNK, 0, 0, 0), lane)
        seconds_of(replay, lane, self._stamps, 5)
        self.chunk_seconds = median(seconds_of(replay, lane, self._stamps, 5))

    def decode_alone(self, num_chats: int) -> float:
        """Return the seconds of a step that has the GPU alone."""
        lane = whole(self._index)
        replay = self._model.captured(PromptStep(0, 0, num_chats, CONTEXT), lane)
        return median(seconds_of(replay, lane, self._stamps, NUM_STEPS))

    def mixed(self, num_chats: int, num_tokens: int) -> float:
        """Return the seconds of a step of both."""
        lane = whole(self._index)
        replay = self._model.captured(PromptStep(num_tokens, HISTORY, num_chats, CONTEXT), lane)
        first = seconds_of(replay, lane, self._stamps, 1)[0]
        return median(seconds_of(replay, lane, self._stamps, max(5, min(50, ceil(0.3 / first)))))

    def beside(self, way: Way, num_chats: int) -> dict[str, Any]:
        """Measure decode steps in one lane and chunks in the other, each alone and both at once."""
        decodes = self._model.captured(PromptStep(0, 0, num_chats, CONTEXT), way.served)
        chunk = self._model.captured(PromptStep(CHUNK, 0, 0, 0), way.chunks)
        step_alone = median(seconds_of(decodes, way.served, self._stamps, NUM_STEPS))
        chunk_alone = median(seconds_of(chunk, way.chunks, self._stamps, 2))
        theirs = Stamps(self._model.pool.device)

        def decode() -> None:
            decodes()
            theirs.put(way.served)
            way.served.stream.synchronize()  # as a lease reads its tokens

        times = times_beside(chunk, way.chunks, self._stamps, 1 + NUM_CHUNKS, decode)
        ticks = theirs.take(way.served)
        chunks = [(later - earlier) * 1e-9 for earlier, later in pairwise(times)]
        steps = [
            (later - earlier) * 1e-9
            for earlier, later in pairwise(ticks)
            if times[0] <= earlier and later <= times[-1]
        ]
        steps = sorted(steps) or [0.0]
        return {
            "way": way.name,
            "chats": num_chats,
            "step_alone": step_alone,
            "chunk_alone": chunk_alone,
            "step": median(steps),
            "worst_step": steps[-1],
            "num_steps": len(steps),
            "chunk": median(chunks),
            "chunk_tokens_per_second": CHUNK / median(chunks),
        }


def within_target(steps: Mapping[int, float], target: float) -> tuple[float, float]:
    """Return the tokens of a chunk, and a second, of the largest mixed step within the target.

    Times are interpolated between measured sizes; 0 if decodes alone take longer.
    """
    sizes = sorted(steps)
    if steps[sizes[0]] > target:
        return 0.0, 0.0
    most = float(sizes[-1])
    for low, high in pairwise(sizes):
        if steps[low] <= target < steps[high]:
            most = low + (high - low) * (target - steps[low]) / (steps[high] - steps[low])
            return most, most / target
    return most, most / steps[sizes[-1]]


def print_ways(bench: Bench, ways: Sequence[str], num_chats: int, index: int) -> Iterator[dict[str, Any]]:
    """Print all ways of two lanes."""
    names = "chats", "way", "step alone", "TPOT ms", "worst ms", "chunk alone", "chunk ms", "tokens/s"
    print("".join(f"{name:>12}" for name in names))
    for name in ways:
        row = bench.beside(way_of(name, index), num_chats)
        times = (row[key] for key in ("step_alone", "step", "worst_step", "chunk_alone", "chunk"))
        shown = f"{num_chats:>12}{name:>16}" + "".join(f"{time * 1e3:>12.2f}" for time in times)
        print(f"{shown}{row['chunk_tokens_per_second']:>12,.0f}", flush=True)
        yield row


def print_targets(
    steps: Mapping[int, float], rows: Sequence[dict[str, Any]], num_chats: int
) -> list[dict[str, Any]]:
    """Print by target the tokens of chunks a second of mixed steps, and of the best lane that meets it."""
    table = []
    print("".join(f"{name:>12}" for name in ("chats", "TPOT ms", "mixed of", "tokens/s", "lane", "tokens/s")))
    for target in TARGETS:
        size, mixed = within_target(steps, target)
        good = [row for row in rows if row["num_steps"] and row["step"] <= target]
        best = max(good, key=lambda row: float(row["chunk_tokens_per_second"]), default=None)
        name, rate = (best["way"], best["chunk_tokens_per_second"]) if best else ("none", 0.0)
        print(f"{num_chats:>12}{target * 1e3:>12.0f}{size:>12.0f}{mixed:>12,.0f}{name:>12}{rate:>12,.0f}")
        table.append({"chats": num_chats, "target": target, "mixed": mixed, "way": name, "lanes": rate})
    return table


def main() -> None:
    parser = script_parser("two_lanes", __doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="a built-in shape (%(default)s)")
    parser.add_argument("--chats", nargs="*", type=int, default=CHATS, help="(%(default)s)")
    parser.add_argument("--ways", nargs="*", default=WAYS, help="as serving_lane.py has them (%(default)s)")
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES, help="of chunks (%(default)s)")
    args = parser.parse_args()
    index = 0
    torch.cuda.set_device(index)
    device, lane = torch.device("cuda", index), whole(index)
    rate = copy_rate(device)
    num_slots = max(args.chats) * (CONTEXT + 1) + HISTORY + CHUNK
    model = LaneModel(args.model, num_slots, LaneDevice(index, torch.bfloat16, lane))
    bench, floors = Bench(model, index), Floors.of(model.config)
    name = torch.cuda.get_device_name(index)
    print(f"{name}: a copy moves {rate / 1e12:.2f} TB/s; a chunk takes {bench.chunk_seconds * 1e3:.1f} ms")
    steps, rows, targets = {}, list[dict[str, Any]](), list[dict[str, Any]]()
    for num_chats in args.chats:
        floor, alone = floors.decode(num_chats, CONTEXT) * 4.3e12 / rate, bench.decode_alone(num_chats)
        print(f"{num_chats} chats alone: {alone * 1e3:.2f} ms a step, floor {floor * 1e3:.2f}")
        steps[num_chats] = {0: alone, **{size: bench.mixed(num_chats, size) for size in args.sizes}}
        print("mixed steps, ms: " + ", ".join(f"{n}: {t * 1e3:.2f}" for n, t in steps[num_chats].items()))
        rows += print_ways(bench, args.ways, num_chats, index)
    for num_chats in args.chats:
        targets += print_targets(steps[num_chats], [r for r in rows if r["chats"] == num_chats], num_chats)
    numbers = {"gpu": name, "model": args.model, "torch": torch.__version__, "copy_rate": rate}
    numbers |= {"chunk_seconds": bench.chunk_seconds, "context": CONTEXT}
    print_result("two_lanes", {**numbers, "mixed": steps, "rows": rows, "targets": targets}, save=args.save)


if __name__ == "__main__":
    main()
