"""Measures how fast data moves between the GPUs of one host.

Every GPU does the same at the same time, as a group does; the slowest counts. The floor is the bytes that
leave one GPU over the rate of its links (450 GB/s each way on an H200). Verbs that the host launches run back
to back, and collectives inside an instance also run in a captured graph.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count, repeat
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser
from torch import Tensor

from loong.attention.exchange import QueryExchange, QueryRouting
from loong.fabric.memory.symmetric_fabric import SymmetricFabric
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.protocol import Fabric, NoPeers, OpenBatch, ring_step
from loong.fabric.world import World
from loong.kernels import Partial
from loong.model.cuda_device import CudaDevice
from loong.model.shapes import find_config
from loong.model.tensor_parallel import Shard

KIB, MIB = 1 << 10, 1 << 20
LINK_BYTES_PER_SECOND = 450e9
SHARD = Shard(find_config("llama-3.1-8b", "dummy"))
NUM_HEADS, HEAD_DIM = SHARD.num_heads, SHARD.config.head_dim
NUM_CALLS, NUM_REPEATS = 8, 7
LARGEST_PUT = 64 * MIB
SEGMENT_MESSAGES = 8  # of 128 MiB
DEADLINE = 20.0

Call = Callable[[], None]


@dataclass(frozen=True)
class Row:
    """One call on one GPU: `num_bytes` leave it."""

    name: str
    num_bytes: int
    seconds: float

    @property
    def floor(self) -> float:
        """Return the floor in seconds."""
        return self.num_bytes / LINK_BYTES_PER_SECOND


class Bench:
    """The part of one process, which measures at the same time as the others."""

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self.fabric, self.world, self.rank = fabric, fabric.world, rank
        self.group = tuple(range(fabric.world.num_instances))
        self._batch_ids = count(1)
        self.batch: OpenBatch = NoPeers(rank)  # of the present row

    def row(self, name: str, num_bytes: int, call: Call) -> Row:
        """Time a call in a batch of its own."""
        with self.fabric.batch(next(self._batch_ids), self.group) as self.batch:
            return Row(name, num_bytes, self._seconds(call))

    def captured_row(self, name: str, num_bytes: int, call: Call) -> Row:
        """Time a call in a captured graph of several."""
        graph = torch.cuda.CUDAGraph()
        with self.fabric.batch(next(self._batch_ids), self.group) as self.batch:
            call()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                for _ in range(NUM_CALLS):
                    call()
            seconds = self._seconds(graph.replay) / NUM_CALLS
        return Row(name, num_bytes, seconds)

    def _seconds(self, call: Call) -> float:
        times: list[float] = []
        for _ in range(NUM_REPEATS + 2):
            torch.cuda.synchronize()
            self.batch.exchange_control(self.group, torch.zeros(1, dtype=torch.int64))
            start, end = _event(), _event()
            start.record()
            for _ in range(NUM_CALLS):
                call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3 / NUM_CALLS)
        self.batch.check()
        return median(times[2:])


def measure_instances(kind: str, directory: Path, num_gpus: int, rank: int) -> list[Row]:
    """Measure verbs between instances of one GPU each."""
    from loong.fabric.cuda_fabrics import connect_gpus  # needs the driver's bindings, as `--help` does not

    device = CudaDevice(rank, torch.bfloat16)
    device.use()
    sockets = SocketFabric(directory, World(num_gpus, 1), rank, deadline=DEADLINE)
    with closing(connect_gpus(kind, sockets, rank, LARGEST_PUT)) as fabric:
        fabric.wait_for_peers()
        bench = Bench(fabric, rank)
        rows = list(puts(bench)) if isinstance(fabric, SymmetricFabric) else []
        rows += [*hops(bench), *exchanges(bench, device), *segments(bench)]
        bench.row("end", 0, lambda: None)  # no process leaves before all are done
    return rows


def measure_ranks(kind: str, directory: Path, num_gpus: int, rank: int) -> list[Row]:
    """Measure collectives between the ranks of one instance."""
    from loong.fabric.cuda_fabrics import connect_gpus

    torch.cuda.set_device(rank)
    sockets = SocketFabric(directory, World(1, num_gpus), rank, deadline=DEADLINE)
    with closing(connect_gpus(kind, sockets, rank, 0)) as fabric:
        fabric.wait_for_peers()
        bench = Bench(fabric, rank)
        rows = list(reductions(bench))
        bench.row("end", 0, lambda: None)
    return rows


def puts(bench: Bench) -> Iterator[Row]:
    """Measure puts into the next GPU's arena, by a copy engine."""
    from loong.fabric.memory.cuda_memory import copy_bytes

    assert isinstance(bench.fabric, SymmetricFabric)
    arena = bench.fabric.arena
    target = arena.host_addresses[(bench.rank + 1) % bench.world.size] + arena.reserve(LARGEST_PUT)
    source = torch.ones(LARGEST_PUT, dtype=torch.uint8, device="cuda")
    for num_bytes in (16 * KIB, MIB, 16 * MIB, LARGEST_PUT):
        stream = torch.cuda.current_stream().cuda_stream
        yield bench.row(
            f"put {size(num_bytes)}",
            num_bytes,
            partial(copy_bytes, target, source.data_ptr(), num_bytes, stream),
        )


def hops(bench: Bench) -> Iterator[Row]:
    """Measure steps of a ring of all GPUs."""
    for num_bytes in (16 * KIB, MIB, 16 * MIB, 128 * MIB):
        held, incoming = torch.ones(2, num_bytes, dtype=torch.uint8, device="cuda").unbind()

        def hop(held: Tensor = held, incoming: Tensor = incoming) -> None:
            ring_step(bench.batch, bench.group, held, incoming).wait()

        yield bench.row(f"ring hop {size(num_bytes)}", num_bytes, hop)


def exchanges(bench: Bench, device: CudaDevice) -> Iterator[Row]:
    """Measure queries out and partials back, with all as masters, as in a layer of a prompt's step."""
    peers = [i for i in bench.group if i != bench.rank]
    for num_rows in (1, 64, 512, 2048):
        exchanged = Exchanged(bench, device, peers, num_rows)
        num_bytes = len(peers) * num_rows * NUM_HEADS * HEAD_DIM * 4  # both ways, in bfloat16
        yield bench.row(f"exchange of a layer, {num_rows} rows", num_bytes, exchanged)


class Exchanged:
    """A layer's exchange."""

    def __init__(self, bench: Bench, device: CudaDevice, peers: Sequence[int], num_rows: int) -> None:
        rows = dict.fromkeys(peers, torch.arange(num_rows))
        routing = QueryRouting(rows, dict.fromkeys(peers, num_rows))
        self._bench, self._device, self._routing = bench, device, routing
        self._exchange: QueryExchange | None = None  # of the batch of its row
        sizes = (NUM_HEADS, HEAD_DIM)
        self._q = torch.ones(num_rows, *sizes, dtype=torch.bfloat16, device="cuda")
        self._part = Partial.identity(num_rows * len(peers), *sizes, self._q.device)
        self._total = Partial.identity(num_rows, *sizes, self._q.device)

    def __call__(self) -> None:
        """Run one exchange."""
        if self._exchange is None:
            self._exchange = QueryExchange(self._bench.batch, self._device, self._routing)
        self._exchange.send_queries(self._q)
        self._exchange.peer_queries()
        self._exchange.send_partials(self._part, self._total)


def segments(bench: Bench) -> Iterator[Row]:
    """Measure messages of 128 MiB from GPU 0 to GPU 1, as in a migration."""
    message = torch.ones(128 * MIB, dtype=torch.uint8, device="cuda")
    for migration_id in range(1, NUM_REPEATS):
        if bench.rank > 1:
            return
        with bench.fabric.migration(migration_id, 1 - bench.rank) as migration:
            verb = migration.send if bench.rank == 0 else migration.receive
            start, end = _event(), _event()
            verb(message).wait()
            start.record()
            for pending in [verb(message) for _ in range(SEGMENT_MESSAGES)]:
                pending.wait()
            end.record()
            end.synchronize()
    num_bytes = SEGMENT_MESSAGES * message.nbytes
    yield Row("migration of 1 GiB", num_bytes, start.elapsed_time(end) * 1e-3)


def reductions(bench: Bench) -> Iterator[Row]:
    """Measure sums over all ranks; every rank sends its shard to each other."""
    group = bench.fabric.tensor_parallel
    for num_bytes in (16 * KIB, 256 * KIB, MIB, 16 * MIB):
        x = torch.ones(1, num_bytes // 2, dtype=torch.bfloat16, device="cuda")

        def reduce(x: Tensor = x) -> None:
            group.all_reduce(x)

        sent = (group.size - 1) * num_bytes
        yield bench.row(f"all-reduce {size(num_bytes)}", sent, reduce)
        if isinstance(bench.fabric, SymmetricFabric):
            yield bench.captured_row(f"all-reduce {size(num_bytes)}, captured", sent, reduce)


def size(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


def slowest(by_rank: list[list[Row]]) -> list[Row]:
    """Return, for each row, the one of the slowest GPU that has it."""
    rows: dict[str, Row] = {}
    for row in (row for rows in by_rank for row in rows):
        if row.name not in rows or rows[row.name].seconds < row.seconds:
            rows[row.name] = row
    return list(rows.values())


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own


def main() -> None:
    parser = script_parser("fabric", __doc__)
    parser.add_argument("--num-gpus", type=int, default=2, help="number of GPUs (%(default)s)")
    parser.add_argument("--fabric", default="symmetric", help="fabric to measure (%(default)s)")
    args = parser.parse_args()
    if args.num_gpus > torch.cuda.device_count():
        parser.error(f"--num-gpus is {args.num_gpus}, but this machine has {torch.cuda.device_count()}")
    print(f"{args.fabric}, {args.num_gpus} GPUs")
    print(f"{'':<40} {'us':>10} {'floor us':>10} {'of floor':>9} {'GB/s':>7}")
    rows = []
    for measure in (measure_instances, measure_ranks):
        with (
            TemporaryDirectory(prefix="loong-") as folder,
            ProcessPoolExecutor(args.num_gpus, mp_context=get_context("spawn")) as processes,
        ):
            places = (repeat(args.fabric), repeat(Path(folder)), repeat(args.num_gpus))
            rows += slowest(list(processes.map(measure, *places, range(args.num_gpus))))
    for row in rows:
        ratio, speed = row.floor / row.seconds, row.num_bytes / row.seconds / 1e9
        print(
            f"{row.name:<40} {row.seconds * 1e6:>10.1f} {row.floor * 1e6:>10.1f} {ratio:>9.0%} {speed:>7.0f}"
        )
    numbers = {
        "fabric": args.fabric,
        "num_gpus": args.num_gpus,
        "link_bytes_per_second": LINK_BYTES_PER_SECOND,
        "torch": torch.__version__,
        "rows": [{**asdict(row), "floor": row.floor} for row in rows],
    }
    print_result("fabric", numbers, save=args.save)


if __name__ == "__main__":
    main()
