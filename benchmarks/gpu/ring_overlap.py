"""Measures the overlap of the next KV block's transfer with the attention of the present one.

A striped ring prefill on processes of this machine, one thread each, through `ring_attention` and a real
`SocketFabric`, is timed in four ways: as it is (overlap); waiting for each transfer before attending (in
turn); without transfers, attending a local block instead (compute); and the transfers alone.

The floor is max(compute, transfer). A socket's transfer is itself work for a processor. So the prediction is
the larger of the floor and the processor seconds of both, spread over the cores.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import count, repeat
from multiprocessing import get_context
from os import sched_getaffinity
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import NamedTuple

import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser
from torch import Tensor

from loong.attention.attention_step import AttentionStep
from loong.attention.ring import ring_attention, ring_layout
from loong.core.instance import ESPGroup
from loong.core.kv_layout import KVLayout, row_of_heads
from loong.core.placement import InstanceId, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.positions import stripe
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.protocol import NoPeers, OpenBatch, Pending, ring_step
from loong.fabric.traffic import Channel
from loong.fabric.world import World
from loong.kernels import Partial
from loong.model.device import CpuDevice
from loong.worker.kv.pool import KVPool

NUM_HEADS, HEAD_DIM = 8, 128
BLOCK_TOKENS = (32, 64, 128, 256, 512)
NUM_PASSES = 2  # in one measurement, as a model's layers follow one another
DEADLINE = 60.0
DEVICE = CpuDevice()


class Timing(NamedTuple):
    """One pass on one process, in seconds."""

    wall: float
    processor: float  # of all threads


Measurements = dict[str, list[Timing]]  # by way, one a repeat


@dataclass(frozen=True, slots=True)
class Setup:
    """The configuration of every process."""

    directory: Path
    num_instances: int
    num_kv_heads: int
    num_repeats: int


@dataclass(frozen=True, slots=True)
class Row:
    """One block size. Times are seconds a pass, medians over repeats of the slowest process."""

    block_tokens: int
    block_bytes: int
    compute: float
    transfer: float
    floor: float
    prediction: float
    overlap: float
    in_turn: float


class Done:
    """A transfer that is over."""

    def wait(self) -> None:
        """Return at once."""


@dataclass(frozen=True, slots=True)
class InTurn(NoPeers):
    """The verbs of a batch, which return when their transfers are over."""

    instance_id: InstanceId
    batch: OpenBatch

    def exchange(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        """Transfer, then return."""
        self.batch.exchange(outgoing, incoming, channel).wait()
        return Done()


class RingPass:
    """One instance's part in a pass of the ring with blocks of `block_tokens`."""

    def __init__(self, setup: Setup, instance_id: InstanceId, block_tokens: int) -> None:
        n = setup.num_instances
        chunk = range(block_tokens * n)
        blocks = tuple(QueryBlock("prompt", stripe(chunk, i, n), i, Transfer.KV) for i in range(n))
        kv_layout = KVLayout(1, row_of_heads(setup.num_kv_heads, HEAD_DIM), "float32")
        pool = KVPool(kv_layout, 1, torch.device("cpu"))  # unused: all KV is new, and none is kept
        batch = BatchPlan(ESPGroup(tuple(range(n))), blocks, ())
        layout = ring_layout(AttentionStep(instance_id, batch, {"prompt": Placement()}, pool), DEVICE)
        assert layout is not None
        self.layout, self.pool = layout, pool.layer(0)
        self.q = torch.randn(block_tokens, NUM_HEADS, HEAD_DIM)
        self.kv = torch.randn(block_tokens, 2, setup.num_kv_heads, HEAD_DIM)
        self.incoming = torch.empty_like(self.kv)

    def attend_and_transfer(self, batch: OpenBatch) -> None:
        """Run the whole pass."""
        ring_attention(self.layout, self.pool, batch, self.q, self.kv, self._nothing_seen(), DEVICE)

    def attend(self, batch: OpenBatch) -> None:
        """Run the pass without its transfers."""
        total = self._nothing_seen()
        own, *others = self.layout.blocks
        layout = replace(self.layout, blocks=(own,))
        ring_attention(layout, self.pool, batch, self.q, self.kv, total, DEVICE)
        for block in others:
            for table in block.tables[None]:
                DEVICE.attend_blocks(self.q, self.kv, table, scale=HEAD_DIM**-0.5, total=total)

    def transfer(self, batch: OpenBatch) -> None:
        """Run the transfers of the pass, one after the other."""
        for _ in self.layout.blocks[1:]:
            ring_step(batch, self.layout.ring, self.kv, self.incoming).wait()

    def _nothing_seen(self) -> Partial:
        return Partial.unseen(self.q, is_merged=True)


def run_instance(setup: Setup, instance_id: InstanceId) -> list[Measurements]:
    """Measure every block size on one process; the others do the same at the same time."""
    torch.set_num_threads(1)
    world = World(setup.num_instances, 1)
    with closing(SocketFabric(setup.directory, world, instance_id, deadline=DEADLINE)) as fabric:
        fabric.wait_for_peers()
        batch_ids = count()
        return [measure(setup, instance_id, size, fabric, batch_ids) for size in BLOCK_TOKENS]


def measure(
    setup: Setup,
    instance_id: InstanceId,
    block_tokens: int,
    fabric: SocketFabric,
    batch_ids: Iterator[int],
) -> Measurements:
    """Time all ways in turn, so that a disturbance affects each of them; the first round warms up."""
    ring = RingPass(setup, instance_id, block_tokens)
    ways: dict[str, Callable[[OpenBatch], None]] = {
        "compute": ring.attend,
        "transfer": ring.transfer,
        "overlap": ring.attend_and_transfer,
        "in_turn": lambda batch: ring.attend_and_transfer(InTurn(instance_id, batch)),
    }
    measurements: Measurements = {way: [] for way in ways}
    for _ in range(1 + setup.num_repeats):
        for way, run in ways.items():
            with fabric.batch(next(batch_ids), ring.layout.ring) as batch:
                batch.exchange_control(ring.layout.ring, torch.zeros(1, dtype=torch.int64))  # start together
                measurements[way].append(time_of(run, batch))
    return {way: timings[1:] for way, timings in measurements.items()}


def time_of(run: Callable[[OpenBatch], None], batch: OpenBatch) -> Timing:
    wall, processor = perf_counter(), process_time()
    for _ in range(NUM_PASSES):
        run(batch)
    return Timing((perf_counter() - wall) / NUM_PASSES, (process_time() - processor) / NUM_PASSES)


def row_of(setup: Setup, block_tokens: int, by_instance: list[Measurements]) -> Row:
    """Summarize the measurements of all processes for one block size."""

    def wall(way: str) -> float:
        walls = ([timing.wall for timing in measured[way]] for measured in by_instance)
        slowest: list[float] = [max(repeat_walls) for repeat_walls in zip(*walls, strict=True)]
        return median(slowest)

    def processor(way: str) -> float:
        return sum(median(timing.processor for timing in measured[way]) for measured in by_instance)

    floor = max(wall("compute"), wall("transfer"))
    return Row(
        block_tokens=block_tokens,
        block_bytes=block_tokens * 2 * setup.num_kv_heads * HEAD_DIM * torch.float32.itemsize,
        compute=wall("compute"),
        transfer=wall("transfer"),
        floor=floor,
        prediction=max(floor, (processor("compute") + processor("transfer")) / len(sched_getaffinity(0))),
        overlap=wall("overlap"),
        in_turn=wall("in_turn"),
    )


def print_table(setup: Setup, rows: list[Row]) -> None:
    print(
        f"ring of {setup.num_instances} processes, {NUM_HEADS} query heads, {setup.num_kv_heads} KV heads,"
        f" head dim {HEAD_DIM}, float32; ms a pass, median of {setup.num_repeats} repeats\n"
    )
    columns = ("compute", "transfer", "floor", "prediction", "overlap", "in_turn")
    print(
        f"{'tokens':>6} {'block':>8}",
        *(f"{name.replace('_', ' '):>10}" for name in columns),
        "  overlap/floor",
    )
    for row in rows:
        times = asdict(row)
        cells = (f"{times[name] * 1e3:>10.2f}" for name in columns)
        size = f"{row.block_bytes >> 10} kB"
        print(f"{row.block_tokens:>6} {size:>8}", *cells, f"{row.overlap / row.floor:>14.2f}")


def main() -> None:
    parser = script_parser("ring_overlap", __doc__)
    parser.add_argument("--num-instances", type=int, default=2, help="number of processes in the ring (2)")
    parser.add_argument("--num-kv-heads", type=int, default=8, help=f"KV heads of {NUM_HEADS} (default 8)")
    parser.add_argument("--num-repeats", type=int, default=41, help="number of repeats of each way (41)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="loong-") as folder:
        setup = Setup(Path(folder), arguments.num_instances, arguments.num_kv_heads, arguments.num_repeats)
        with ProcessPoolExecutor(setup.num_instances, mp_context=get_context("spawn")) as processes:
            results = list(processes.map(run_instance, repeat(setup), range(setup.num_instances)))
    by_size = zip(BLOCK_TOKENS, zip(*results, strict=True), strict=True)
    rows = [row_of(setup, block_tokens, list(measured)) for block_tokens, measured in by_size]
    print_table(setup, rows)
    numbers = {
        "num_instances": setup.num_instances,
        "num_heads": NUM_HEADS,
        "num_kv_heads": setup.num_kv_heads,
        "head_dim": HEAD_DIM,
        "num_repeats": setup.num_repeats,
        "num_passes": NUM_PASSES,
        "rows": [asdict(row) for row in rows],
    }
    print_result("ring_overlap", numbers, save=arguments.save)


if __name__ == "__main__":
    main()
