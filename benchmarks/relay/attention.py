"""Measures attention of decodes behind a shared prefix, which is read once, or again for each of them.

RelayAttention's figures 1 and 6. b queries of one step each attend s shared tokens, and c of their own.
"apart" lists the slots of all s + c tokens for each query, as a server with --no-relay does. "once" attends
the shared slots in one pass, and merges. "theory" is equation 10 of the paper in its form for GQA, with a
ceiling where computing takes longer than reading (docs/relay-attention.md). With s = 0 both are the same
kernels, as in a step in which nothing is shared. On CPUs times are of one processor. Ceiling: theory; at
least 4 times at s = 4,096 and b = 64.

    python benchmarks/relay/attention.py --device cuda --heads 32x32x128 32x8x128 52x52x128 --save
    python benchmarks/relay/attention.py --device cpu --heads 8x8x64 8x2x64 --num-shared 512 4096 --save
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import thread_time
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "support"))

from relay_theory import Heads, published_speed_up
from result import print_result, script_parser

from loong.kernels import Partial
from loong.kernels.attend_task import AttendTask
from loong.kernels.shared_table import SharedTable
from loong.kernels.slots import SlotLists
from loong.model.device import CpuDevice, Device


class HeadShape(NamedTuple):
    """Query heads, KV heads, and the dimension of a head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def head_shape(text: str) -> HeadShape:
    """Parse 32x8x128."""
    return HeadShape(*map(int, text.split("x")))


@dataclass(frozen=True, slots=True)
class Step:
    """The attention of one layer of a step: b queries, s shared tokens, c of each alone."""

    device: Device
    q: Tensor
    kv: Tensor
    shared: Tensor  # [s] slots
    alone: Tensor  # [b, c] slots

    @classmethod
    def of(cls, device: Device, heads: HeadShape, sizes: tuple[int, int, int], dtype: torch.dtype) -> "Step":
        """Return a step of b, s and c with random values, whose slots lie in any order."""
        num_queries, num_shared, num_alone = sizes
        count, where = num_shared + num_queries * num_alone, device.torch_device
        q = torch.randn(num_queries, heads.num_heads, heads.head_dim, dtype=dtype, device=where)
        kv = torch.randn(count, 2, heads.num_kv_heads, heads.head_dim, dtype=dtype, device=where)
        slots = torch.arange(count, device=where)
        shared, alone = slots[:num_shared], slots[num_shared:]
        return cls(device, q, kv, shared, alone.view(num_queries, num_alone))

    def apart(self) -> Callable[[], Partial]:
        """Return a call that reads all tokens of each query."""
        lists = SlotLists.of([torch.cat([self.shared, own]) for own in self.alone])
        return self._slots(lists, self.q.dtype)

    def own(self) -> Callable[[], Partial]:
        """Return a call that reads the tokens that each query has alone."""
        return self._slots(SlotLists.of(list(self.alone)), torch.float32)

    def once(self) -> Callable[[], Partial]:
        """Return a call that reads shared tokens once."""
        own, q, where, scale = self.own(), self.q, self.device.torch_device, self.q.shape[-1] ** -0.5
        task = AttendTask.full(0, len(q), 0, len(self.shared))
        tasks = torch.tensor([task, *[[0] * 8] * 63], device=where)
        table = SharedTable(torch.arange(len(q), device=where), 4, tasks, self.shared)

        def call() -> Partial:
            total = own()
            self.device.attend_shared(q, self.kv, table, scale=scale, total=total)
            return total._replace(out=total.out.to(q.dtype))

        return call

    def _slots(self, lists: SlotLists, dtype: torch.dtype) -> Callable[[], Partial]:
        q, scale = self.q, self.q.shape[-1] ** -0.5
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        out = Partial(torch.empty_like(q, dtype=dtype), lse)

        def call() -> Partial:
            self.device.attend_slots(q, self.kv, lists, scale=scale, out=out)
            return out

        return call


def seconds(call: Callable[[], object], device: Device, repeats: int) -> float:
    """Return the median time of a call: on a GPU that of a captured one, as steps are."""
    call()
    device.wait()
    if device.torch_device.type == "cuda":
        return _captured_seconds(call, repeats)
    times = []
    for _ in range(repeats):
        start = thread_time()
        call()
        times.append(thread_time() - start)
    return median(times)


def _captured_seconds(call: Callable[[], object], repeats: int) -> float:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(8):
                call()
    times = list[float]()
    for _ in range(repeats):
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 8e3)
    return median(times)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own


def device_of(name: str, dtype: torch.dtype) -> Device:
    """Return the device on which attention runs."""
    if name == "cpu":
        return CpuDevice()
    from loong.model.cuda_device import CudaDevice  # not at the top: it needs Triton for GPUs

    return CudaDevice(0, dtype)


def main() -> None:
    parser = script_parser("relay_attention", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(%(default)s)")
    parser.add_argument("--dtype", help="of queries and KV (float32 on cpu, bfloat16 on cuda)")
    parser.add_argument("--heads", type=head_shape, nargs="+", default=[HeadShape(8, 8, 64)], metavar="HxKxD")
    parser.add_argument("--num-queries", type=int, nargs="+", default=[1, 4, 16, 64, 256], metavar="B")
    parser.add_argument(
        "--num-shared", type=int, nargs="+", default=[0, 64, 512, 2048, 4096, 16384, 32768], metavar="S"
    )
    parser.add_argument("--num-alone", type=int, nargs="+", default=[128], metavar="C")
    parser.add_argument("--flops-a-byte", type=float, default=160.0, help="of the device (%(default)s)")
    parser.add_argument("--most-slots", type=int, default=1 << 22, help="of a step, b (s + c) (%(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="(%(default)s)")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype or ("float32" if args.device == "cpu" else "bfloat16"))
    device = device_of(args.device, dtype)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(
        f"{'heads':>12}{'b':>5}{'c':>6}{'s':>8}{'apart us':>12}{'once us':>12}{'speed-up':>10}{'theory':>8}"
    )
    rows = []
    for heads in args.heads:
        theory = Heads(heads.num_heads, heads.num_kv_heads, dtype.itemsize, args.flops_a_byte)
        for sizes in _sizes(args.num_queries, args.num_shared, args.num_alone, args.most_slots):
            row = _row(device, heads, sizes, theory, dtype, args.repeats)
            rows.append(row)
            print(
                f"{'x'.join(map(str, heads)):>12}{row['b']:>5}{row['c']:>6}{row['s']:>8}"
                f"{1e6 * row['apart']:>12.0f}{1e6 * row['once']:>12.0f}"
                f"{row['apart'] / row['once']:>10.2f}{row['theory']:>8.2f}",
                flush=True,
            )
    facts = {"device": args.device, "dtype": str(dtype), "rows": rows, "command": sys.argv[1:]}
    print_result("relay_attention", facts, save=args.save)


def _sizes(
    num_queries: Sequence[int], num_shared: Sequence[int], num_alone: Sequence[int], most: int
) -> list[tuple[int, int, int]]:
    every = [(b, s, c) for c in num_alone for b in num_queries for s in num_shared]
    return [(b, s, c) for b, s, c in every if b * (s + c) <= most]


def _row(
    device: Device,
    heads: HeadShape,
    sizes: tuple[int, int, int],
    theory: Heads,
    dtype: torch.dtype,
    repeats: int,
) -> dict[str, float]:
    """Return the times of both ways; where nothing is shared, of the same kernels, measured twice."""
    num_queries, num_shared, num_alone = sizes
    step = Step.of(device, heads, sizes, dtype)
    apart = step.apart()
    once = step.once() if num_shared and num_queries > 1 else step.apart()
    return {
        **dict(zip("bsc", sizes, strict=True)),
        **heads._asdict(),
        "apart": seconds(apart, device, repeats),
        "once": seconds(once, device, repeats),
        "theory": theory.speed_up(num_shared, num_alone, num_queries) if num_shared else 1.0,
        "published": published_speed_up(num_shared, num_alone, num_queries),
    }


if __name__ == "__main__":
    main()
