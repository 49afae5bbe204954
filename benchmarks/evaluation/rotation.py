"""Rotational pipelining against fixed batches of each replica, by the cost model (Lamina, 5.1).

R replicas share memory instances, which hold all KV of B decodes. Fixed, each replica has B / R requests of
its own, whole or in 2 to 4 micro-batches, and reads its weights once for each. Rotating, R + 1
micro-batches of all requests go over the replicas: each reads its weights (R + 1) / R times a step. Printed
are the largest gains over the best fixed way. Its replicas meet at memory instances by chance, or they are
perfectly staggered. A bound on the latter follows from w seconds for weights, t for products and a for
attention of all. Fixed takes max(hypot(w, t) + a / R, a) whole, and max(hypot(2 w, t), a) in two. Rotating
takes max(hypot(w (R + 1) / R, t), a). At last there are whole runs of `lamina` and `lamina-rotational`,
with prompts, whose requests arrive all at once. Needs no device.

    python benchmarks/evaluation/rotation.py    # a minute
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from math import hypot
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from goodput_cells import Cell
from result import print_result, script_parser

from loong.core.cost.work import StepWork, WorkCount
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId, striped
from loong.hardware.model_shape import shape_of
from loong.model.shapes import find_config
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.simulation.cluster import Hardware
from loong.simulation.points import asked_of, run_point
from loong.workloads.report.report import table

REPLICAS = (2, 3, 4)
MEMORY = (1, 2, 4, 8, 16)
BATCHES = (12, 24, 48, 96, 192, 384, 768)
CONTEXTS = (4_096, 16_384, 65_536, 262_144)
MOST_MICRO_BATCHES = 4
WHOLE = (  # replicas, memory instances, workload, requests
    (2, 4, "fixed(4000,500)", 192),
    (2, 8, "fixed(16000,500)", 96),
    (3, 8, "fixed(4000,500)", 384),
)
TITLES = (
    *("replicas", "memory", "context", "batch", "fixed ms", "in 2", "in 3", "rotating"),
    *("gain", "staggered", "bound"),
)
NUM_SHOWN = 4  # cells, by gain
NUM_ROUNDS = 50  # until replicas that read at the same time have settled


@dataclass(frozen=True, slots=True)
class Pipelined:
    """Seconds of a step of `batch` requests in each way; `fixed` is by micro-batches of each replica.

    `staggered` is the best fixed way if replicas never meet at memory instances.
    """

    num_replicas: int
    num_memory: int
    batch: int
    context: int
    fixed: Sequence[float]
    staggered: float
    rotating: float

    @property
    def gain(self) -> float:
        """Return the tokens/s of rotation as a multiple of those of the best fixed way."""
        return min(self.fixed) / self.rotating


def step_of(
    members: Sequence[InstanceId], memory: Sequence[InstanceId], batch: int, context: int, parts: int
) -> StepWork:
    """Return a decode step of requests whose KV is on memory instances, with masters in turn."""
    count = WorkCount(members, is_lease=True)
    for _, master_id in zip(range(batch), cycle(members), strict=False):
        count.add_decode(master_id, striped("", range(context), tuple(memory)))
    step = count.step(ESPGroup(tuple(members)), is_first=False)
    return replace(step, num_micro_batches=parts, rotates=len(members) > 1)


def fixed_seconds(model: WorkCostModel, step: StepWork, num_others: int) -> float:
    """Return the seconds of a replica's step while as many others take steps like it.

    While others read on an instance for a share of the time, it answers slower, and so do they.
    """
    share, seconds = 0.0, 0.0
    for _ in range(NUM_ROUNDS):
        shares = dict.fromkeys(step.holders, num_others * share)
        seconds = model.step_time(replace(step, read_shares=shares))
        served = max(model.served_time(work) for work in step.holders.values())
        share = min(1.0, served * (1 + num_others * share) / seconds)
    return seconds


def staggered_seconds(model: WorkCostModel, step: StepWork, num_replicas: int) -> float:
    """Return the seconds of a replica's step if all read in turn."""
    served = max(model.served_time(work) for work in step.holders.values())
    return max(model.step_time(step), num_replicas * served)


def pipelined(args: argparse.Namespace) -> Iterator[Pipelined]:
    """Yield all cells whose KV has room."""
    shape = shape_of(find_config(args.model, "dummy"))
    for num_replicas in REPLICAS:
        for num_memory in MEMORY:
            cluster = Hardware(shape, args.device, num_replicas, memory_instances=num_memory).cluster(
                "lamina"
            )
            model, pools = cluster.cost_model, [i.kv_capacity for i in cluster.instances[num_replicas:]]
            memory = range(num_replicas, num_replicas + num_memory)
            for context in CONTEXTS:
                for batch in BATCHES:
                    if batch * context > sum(pools):
                        continue
                    own = [
                        step_of((0,), memory, batch // num_replicas, context, parts)
                        for parts in range(1, MOST_MICRO_BATCHES + 1)
                    ]
                    fixed = [fixed_seconds(model, step, num_replicas - 1) for step in own]
                    staggered = min(staggered_seconds(model, step, num_replicas) for step in own)
                    rotating = step_of(range(num_replicas), memory, batch, context, num_replicas + 1)
                    seconds = model.step_time(rotating)
                    yield Pipelined(num_replicas, num_memory, batch, context, fixed, staggered, seconds)


def bound(num_replicas: int) -> float:
    """Return the most that rotation can gain over the best fixed way, whatever takes how long."""

    def gain(products: float) -> float:
        rotating = hypot((num_replicas + 1) / num_replicas, products)  # and as long for attention, at best
        return min(hypot(1, products) / rotating + 1 / num_replicas, hypot(2, products) / rotating)

    return max(gain(i / 1000) for i in range(10_000))


def row_of(p: Pipelined) -> tuple[str, ...]:
    """Return a row of the table."""
    seconds = (f"{1e3 * s:.2f}" for s in (*p.fixed[:3], p.rotating))
    counts = str(p.num_replicas), str(p.num_memory), f"{p.context:,}", str(p.batch)
    gains = p.gain, p.staggered / p.rotating, bound(p.num_replicas)
    return *counts, *seconds, *(f"{gain:.3f}" for gain in gains)


def whole_runs(args: argparse.Namespace) -> Iterator[tuple[str, str, float, float]]:
    """Yield devices and load, a policy, and its requests a second and mean seconds a token."""
    shape = shape_of(find_config(args.model, "dummy"))
    for num_replicas, num_memory, workload, num_requests in WHOLE:
        for policy in ("lamina", "lamina-rotational"):
            cell = Cell(
                workload, "tight", policy, 0, args.model, args.device, num_replicas, 1, num_requests, 0.1
            )
            hardware = Hardware(shape, args.device, num_replicas, memory_instances=num_memory)
            config = replace(cell.config(), is_per_class=False, hardware=hardware)
            config = replace(config, policy=replace(config.policy, max_micro_batches=2))
            point = run_point(config, asked_of(config, policy, config.rules[0], 1e6))
            tpot = point.metrics.latencies.tpot
            what = f"{num_replicas} + {num_memory}, {num_requests} {workload}"
            yield what, policy, point.metrics.request_throughput, 0.0 if tpot is None else tpot["mean"]


def main() -> None:
    parser = script_parser("rotation", __doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="model to simulate (%(default)s)")
    parser.add_argument("--device", default="h200", help="device to simulate (%(default)s)")
    args = parser.parse_args()
    found = list(pipelined(args))
    rows = list[tuple[str, ...]]()
    for num_replicas in REPLICAS:
        here = [p for p in found if p.num_replicas == num_replicas]
        rows += map(row_of, sorted(here, key=lambda p: -p.gain)[:NUM_SHOWN])
        num_better = sum(p.gain > 1.0 for p in here)
        print(f"{num_replicas} replicas: rotation is faster in {num_better} of {len(here)} cells")
    print(table(TITLES, rows))
    runs = list(whole_runs(args))
    shown = [(what, policy, f"{rate:.2f}", f"{1e3 * tpot:.1f}") for what, policy, rate, tpot in runs]
    print(table(("devices and load", "policy", "requests/s", "ms a token"), shown))
    numbers = {
        "command": shlex.join(["python", *sys.argv]),
        "cells": [asdict(p) | {"gain": p.gain} for p in found],
        "runs": runs,
        "bounds": {num_replicas: bound(num_replicas) for num_replicas in REPLICAS},
    }
    print_result("rotation", numbers, save=args.save)


if __name__ == "__main__":
    main()
