"""Measures the overlap of the ring's transfers with the computation of a prompt on a group of GPUs.

A whole prompt of random tokens is striped over the GPUs, with dummy weights, and timed in four ways:

- overlap: as it is; the next block of KV travels while the present one is attended
- in turn: each transfer ends before the block before it is attended
- compute: without transfers; each block is a copy of the own one, on the same GPU
- transfer: the transfers of all layers alone

"Hidden" is the share of the transfers' time that the overlap saves: (compute + transfer - overlap) over
transfer. The floor is the larger of compute and transfer. Steps of few tokens are captured, and put their KV
into the memory of all others at once: such lengths have no ring, and are left out.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "support"))

from gpu_group import GpuGroup, GpuInstance
from prefill import MAX_TOKENS, striped_prompt
from result import print_result, script_parser
from ring_overlap import Done

from loong.attention import ring
from loong.core.instructions import RunBatch
from loong.fabric.protocol import OpenBatch, Pending, ring_step
from loong.worker.steps.ring_inputs import MAX_KV_ROWS

LENGTHS = (32768, 131072, 262144, 524288)
NUM_SECONDS = 4.0  # of each way, but at least 2 runs; the first is not counted
MOST_RUNS = 9

RingStep = Callable[[OpenBatch, tuple[int, ...], Tensor, Tensor], Pending]


@dataclass(frozen=True, slots=True)
class Row:
    """The seconds of a prompt in each way."""

    tokens: int
    dop: int
    overlap: float
    in_turn: float
    compute: float
    transfer: float

    @property
    def floor(self) -> float:
        """Return the least time of a perfect overlap."""
        return max(self.compute, self.transfer)

    @property
    def hidden(self) -> float:
        """Return the share of the transfers' time that the overlap saves."""
        return (self.compute + self.transfer - self.overlap) / self.transfer

    def cells(self) -> str:
        """Return the text of a line."""
        times = (self.overlap, self.in_turn, self.compute, self.transfer, self.floor)
        shown = " ".join(f"{1e3 * seconds:>10.1f}" for seconds in times)
        return (
            f"{self.tokens:>8} {self.dop:>4} {shown} {self.overlap / self.floor:>14.3f} {self.hidden:>7.0%}"
        )


def as_it_is(
    begin: RingStep, batch: OpenBatch, ring: tuple[int, ...], outgoing: Tensor, incoming: Tensor
) -> Pending:
    """Begin a transfer."""
    return begin(batch, ring, outgoing, incoming)


def in_turn(
    begin: RingStep, batch: OpenBatch, ring: tuple[int, ...], outgoing: Tensor, incoming: Tensor
) -> Pending:
    """Begin a transfer, and let the device wait for it."""
    begin(batch, ring, outgoing, incoming).wait()
    return Done()


def without(
    _begin: RingStep, _batch: OpenBatch, _ring: tuple[int, ...], outgoing: Tensor, incoming: Tensor
) -> Pending:
    """Transfer nothing, and copy: a GPU needs less power for keys that are all alike, and is faster."""
    num_rows = min(len(outgoing), len(incoming))
    incoming[:num_rows].copy_(outgoing[:num_rows])
    return Done()


WAYS = {"overlap": as_it_is, "in_turn": in_turn, "compute": without}


def run_prompt(instance: GpuInstance, commands: list[RunBatch], way: str) -> tuple[float, list[float]]:
    """Return when the prompt began and when its token was reported."""
    with patch.object(ring, "ring_step", partial(WAYS[way], ring_step)):
        ran = instance.run_chunks(commands)
    return ran.begun_at, ran.reported_at


def run_transfers(instance: GpuInstance, command: RunBatch) -> tuple[float, list[float]]:
    """Run the transfers of a prompt alone; return when they began and when they were over."""
    group, pool = command.plan.group, instance.pool.layer(0)
    sizes = {block.master_id: len(block.positions) for block in command.plan.queries}
    sources = [group.source_at(instance.instance_id, step) for step in range(group.dop)]
    blocks = [pool.new_empty(sizes[source], *pool.shape[1:]) for source in sources]
    with instance.fabric.batch(command.batch_id, group.instance_ids) as batch:
        torch.cuda.synchronize()
        begun_at = perf_counter()
        for _ in range(instance.config.num_layers):
            for outgoing, incoming in pairwise(blocks):
                ring_step(batch, group.instance_ids, outgoing, incoming).wait()
        torch.cuda.synchronize()
        return begun_at, [perf_counter()]


def seconds_of(group: GpuGroup, length: int, dop: int, way: str) -> float:
    """Return the seconds of a prompt in one way, from its first beginning to its last end."""
    commands = striped_prompt(group, length, dop, dop, length)
    if way == "transfer":
        ran = group.on(dict.fromkeys(range(dop), partial(run_transfers, command=commands[0])))
    else:
        ran = group.on(dict.fromkeys(range(dop), partial(run_prompt, commands=commands, way=way)))
    begun_at = min(begun for begun, _ in ran.values())
    return max(end for _, ended in ran.values() for end in ended) - begun_at


def measure(group: GpuGroup, length: int, dop: int) -> Row:
    """Measure all ways by turns, so that a disturbance affects each of them."""
    times: dict[str, list[float]] = {way: [] for way in (*WAYS, "transfer")}
    num_runs = 2
    while len(times["overlap"]) < num_runs:
        for way, measured in times.items():
            measured.append(seconds_of(group, length, dop, way))
        num_runs = max(2, min(MOST_RUNS, int(NUM_SECONDS / times["overlap"][-1])))
    return Row(length, dop, **{way: median(measured[1:]) for way, measured in times.items()})


def main() -> None:
    parser = script_parser("prefill_overlap", __doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="built-in shape of the model (%(default)s)")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS, help="prompt lengths in tokens (%(default)s)"
    )
    parser.add_argument("--dop", type=int, nargs="+", default=[2], help="numbers of GPUs in a group (2)")
    args = parser.parse_args()
    group = GpuGroup(args.model, max(args.dop), MAX_TOKENS)
    print(f"started in {group.seconds_to_start:.1f} s; times in ms")
    print(
        f"{'tokens':>8} {'DoP':>4}",
        *(f"{name:>10}" for name in ("overlap", "in turn", "compute", "transfer", "floor")),
        f"{'overlap/floor':>14} {'hidden':>7}",
    )
    rows = []
    for length in args.lengths:
        for dop in args.dop:
            if dop * MAX_KV_ROWS < length <= dop * MAX_TOKENS:
                rows.append(measure(group, length, dop))
                print(rows[-1].cells(), flush=True)
    numbers = {"model": args.model, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}
    print_result("prefill_overlap", numbers, save=args.save)


if __name__ == "__main__":
    main()
