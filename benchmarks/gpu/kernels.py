"""Compares the kernels with the memory bandwidth and the arithmetic rate of the GPU.

Each row is one call as a model makes it, in bfloat16. The floor is the larger of two times: the bytes to be
moved over the bandwidth of a large copy, and the floating-point operations over the rate of a large matrix
product. Both rates were measured on an H200. Calls are replayed from a CUDA graph that goes through several
layers' memory. So no call finds its data in a cache, and none waits for the host.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import TypeAlias

import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser
from torch import Tensor

from loong.kernels import Partial
from loong.kernels.attend_task import AttendTask
from loong.kernels.attention.cudnn_tile import attend_tile
from loong.kernels.gpu import (
    DrawWorkspace,
    LinearWorkspace,
    PieceWorkspace,
    SplitWorkspace,
    activate_and_mul,
    add_rms_norm,
    attend_blocks,
    attend_slots,
    best_num_cuts,
    copy_rows,
    draw,
    is_faster,
    linear,
    merge_into,
    rotate_and_store,
)
from loong.kernels.sampling.draw_params import DrawParams
from loong.kernels.slots import SlotLists

BYTES_PER_SECOND = 4.27e12
FLOPS_PER_SECOND = 790e12
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
NUM_LAYERS = 4
NUM_REPEATS = 20
CHUNKS = ((16, 512), (100, 512), (100, 4096), (16, 32768), (100, 32768), (300, 32768), (2048, 65536))

TILES = (128, 256, 384, 512, 640), (16384, 65536)  # queries and keys of the library's rectangles
PIECES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Shape:
    """The attention and MLP of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    mlp_size: int
    vocab_size: int
    head_dim: int = 128

    @property
    def hidden_size(self) -> int:
        """Return E."""
        return self.num_heads * self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of a token in a layer."""
        return 2 * self.num_kv_heads * self.head_dim * DTYPE.itemsize

    def kv(self, num_tokens: int) -> Tensor:
        """Return keys and values of one layer."""
        return torch.randn(num_tokens, 2, self.num_kv_heads, self.head_dim, device=DEVICE, dtype=DTYPE)

    def q(self, num_tokens: int) -> Tensor:
        """Return queries of one layer."""
        return torch.randn(num_tokens, self.num_heads, self.head_dim, device=DEVICE, dtype=DTYPE)

    def layers(self, num_tokens: int) -> list[Tensor]:
        """Return the KV of `num_tokens` tokens, layer by layer."""
        return [self.kv(num_tokens) for _ in range(NUM_LAYERS)]

    def seen(self, *num_tokens: int) -> Partial:
        """Return a partial of one layer."""
        lse = torch.randn(*num_tokens, self.num_heads, device=DEVICE)
        return Partial(torch.randn(*num_tokens, self.num_heads, self.head_dim, device=DEVICE), lse)


Call: TypeAlias = Callable[[], None]

SHAPES = (Shape("Llama-3.1-8B", 32, 8, 14336, 128256), Shape("Llama-2-7B", 32, 32, 11008, 32000))


@dataclass(frozen=True)
class Case:
    """The same call in each of some layers, and the bytes and operations of one call."""

    name: str
    calls: list[Call]
    num_bytes: float
    num_flops: float = 0.0

    @property
    def floor(self) -> float:
        """Return the floor in seconds."""
        return max(self.num_bytes / BYTES_PER_SECOND, self.num_flops / FLOPS_PER_SECOND)


def seconds_of(case: Case) -> float:
    """Return the median time of one call."""
    for call in case.calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in case.calls:
            call()
    times = []
    for _ in range(NUM_REPEATS + 2):
        start, end = event(), event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1e3 / len(case.calls))
    return median(times[2:])


def event() -> torch.cuda.Event:
    """Return a mark in the stream that records its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own


def decode_cases(shape: Shape) -> Iterator[Case]:
    """Yield cases of one token of each request over all its KV, whose slots lie anywhere in the pool."""
    for name, lengths in (
        ("1 x 128k", [131072]),
        ("8 x 8k", [8192] * 8),
        ("32 x 1k", [1024] * 32),
        ("32 x 4k", [4096] * 32),
        ("128 x 1k", [1024] * 128),
        ("64 of 100 to 13k", [100 * 2 ** (i % 8) + i for i in range(64)]),
    ):
        total, num_requests = sum(lengths), len(lengths)
        lists = SlotLists.of(list(torch.split(torch.randperm(total, device=DEVICE), lengths)))
        num_cuts = best_num_cuts(shape.num_kv_heads, DEVICE)
        workspace = SplitWorkspace.empty(num_cuts, num_requests, shape.num_heads, shape.head_dim, DEVICE)
        q, out, scale = shape.q(num_requests), shape.seen(num_requests), shape.head_dim**-0.5
        calls: list[Call] = [
            partial(attend_slots, q, kv, lists, scale=scale, workspace=workspace, out=out)
            for kv in shape.layers(total)
        ]
        yield Case(f"decode {name}", calls, total * shape.kv_bytes)


def prefill_cases(shape: Shape) -> Iterator[Case]:
    """Yield chunks over themselves, many short prompts at once, and chunks over their history in the pool."""
    short = [AttendTask.causal(i * 1024, range(1024), i * 1024, range(1024)) for i in range(16)]
    for name, tasks, num_scores, has_slots in (
        ("causal 4k", [AttendTask.causal(0, range(4096), 0, range(4096))], 4096**2 / 2, False),
        ("causal 16k", [AttendTask.causal(0, range(16384), 0, range(16384))], 16384**2 / 2, False),
        ("16 x causal 1k", short, 16 * 1024**2 / 2, False),
        *(
            (f"{num_queries} over {num_keys} slots", [full], num_queries * num_keys, True)
            for num_queries, num_keys in CHUNKS
            for full in [AttendTask.full(0, num_queries, 0, num_keys)]
        ),
    ):
        num_tokens = max(task.query_row + task.num_queries for task in tasks)
        num_keys = max(task.key_row + task.num_keys for task in tasks)
        table = torch.tensor(tasks, dtype=torch.int64, device=DEVICE)
        slots = torch.randperm(num_keys, device=DEVICE) if has_slots else None
        q = shape.q(num_tokens)
        total = Partial(torch.empty_like(q), torch.empty(num_tokens, shape.num_heads, device=DEVICE))
        num_processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        workspace = PieceWorkspace.empty(num_processors, shape.head_dim, DEVICE)
        calls: list[Call] = [
            partial(attend_alone, q, kv, table, total, slots, workspace) for kv in shape.layers(num_keys)
        ]
        num_flops = 4 * num_scores * shape.num_heads * shape.head_dim
        num_bytes = num_keys * shape.kv_bytes + 2 * num_tokens * shape.hidden_size * DTYPE.itemsize
        yield Case(f"prefill {name}", calls, num_bytes, num_flops)


def tile_cases(shape: Shape) -> Iterator[Case]:
    """Yield rectangles by the library whose keys come in pieces, and their merge."""
    for num_queries, num_keys, num_pieces in product(*TILES, PIECES):
        q, total = shape.q(num_queries), shape.seen(num_queries)
        calls: list[Call] = [
            partial(attend_in_pieces, q, kv, num_pieces, total) for kv in shape.layers(num_keys)
        ]
        num_flops = 4 * num_queries * num_keys * shape.hidden_size
        yield Case(
            f"tile {num_queries} x {num_keys} in {num_pieces}", calls, num_keys * shape.kv_bytes, num_flops
        )


def attend_in_pieces(q: Tensor, kv: Tensor, num_pieces: int, total: Partial) -> None:
    """Attend a tile of full attention."""
    scale = q.shape[-1] ** -0.5
    merge_into(total, attend_tile(q, kv, scale, is_causal=False, num_pieces=num_pieces))


def attend_alone(
    q: Tensor, kv: Tensor, tasks: Tensor, total: Partial, slots: Tensor | None, workspace: PieceWorkspace
) -> None:
    """Attend queries that have no other partials."""
    total.lse.fill_(-torch.inf)
    scale = q.shape[-1] ** -0.5
    attend_blocks(q, kv, tasks, scale=scale, total=total, slots=slots, workspace=workspace)


def merge_cases(shape: Shape, num_tokens: int) -> Iterator[Case]:
    """Yield merges of a group's partials at their master."""
    for num_parts in (1, 7):
        layers = [(shape.seen(num_tokens), shape.seen(num_parts, num_tokens)) for _ in range(NUM_LAYERS)]
        calls: list[Call] = [partial(merge_into, total, parts) for total, parts in layers]
        num_bytes = (2 + num_parts) * num_tokens * shape.num_heads * (shape.head_dim + 1) * 4
        yield Case(f"merge {num_parts} into {num_tokens}", calls, num_bytes)


def row_cases(shape: Shape, num_tokens: int) -> Iterator[Case]:
    """Yield copies of KV out of a pool, into one, and out of a passing block."""
    pools, blocks = shape.layers(4 * num_tokens), shape.layers(num_tokens)
    rows = torch.randperm(4 * num_tokens, device=DEVICE)[:num_tokens]
    some = torch.arange(0, num_tokens, 4, device=DEVICE)
    pairs = list(zip(pools, blocks, strict=True))
    reads: list[Call] = [partial(copy_rows, pool, block, source_rows=rows) for pool, block in pairs]
    writes: list[Call] = [partial(copy_rows, block, pool, target_rows=rows) for pool, block in pairs]
    keeps: list[Call] = [
        partial(copy_rows, block, pool, source_rows=some, target_rows=rows[: len(some)])
        for pool, block in pairs
    ]
    num_bytes = 2 * num_tokens * shape.kv_bytes
    yield Case(f"gather {num_tokens} rows", reads, num_bytes)
    yield Case(f"scatter {num_tokens} rows", writes, num_bytes)
    yield Case(f"keep 1 in 4 of {num_tokens} rows", keeps, num_bytes / 4)


def model_cases(shape: Shape, num_tokens: int) -> Iterator[Case]:
    """Yield the operations between the matrix products of a layer."""
    num_heads, num_kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    num_all = num_heads + 2 * num_kv_heads
    angles, rows = values(num_tokens, head_dim), torch.randperm(num_tokens, device=DEVICE)
    finish: list[Call] = [
        partial(
            rotate_and_store,
            values(num_tokens, num_all, head_dim),
            angles,
            angles,
            q=shape.q(num_tokens),
            kv=shape.kv(num_tokens),
            rows=rows,
        )
        for _ in range(NUM_LAYERS)
    ]
    size, weight = shape.hidden_size, values(shape.hidden_size)
    norms: list[Call] = [
        partial(
            add_rms_norm,
            values(num_tokens, size),
            weight,
            1e-5,
            added=values(num_tokens, size),
            out=values(num_tokens, size),
        )
        for _ in range(NUM_LAYERS)
    ]
    gates: list[Call] = [
        partial(
            activate_and_mul, values(num_tokens, 2 * shape.mlp_size), out=values(num_tokens, shape.mlp_size)
        )
        for _ in range(NUM_LAYERS)
    ]
    element_bytes = num_tokens * DTYPE.itemsize
    yield Case(f"rotate and store {num_tokens}", finish, 2 * element_bytes * num_all * head_dim)
    yield Case(f"add and norm {num_tokens}", norms, 4 * element_bytes * size)
    yield Case(f"silu and mul {num_tokens}", gates, 3 * element_bytes * shape.mlp_size)


def linear_cases(shape: Shape, num_rows: int) -> Iterator[Case]:
    """Yield the products with the weights of a layer and of the output, and the library's."""
    hidden, mlp, num_heads = shape.hidden_size, shape.mlp_size, shape.num_heads + 2 * shape.num_kv_heads
    workspace = LinearWorkspace.empty(torch.cuda.get_device_properties(DEVICE).multi_processor_count, DEVICE)
    for name, num_columns, size in (
        ("qkv", num_heads * shape.head_dim, hidden),
        ("o", hidden, hidden),
        ("gate and up", 2 * mlp, hidden),
        ("down", hidden, mlp),
        ("output", shape.vocab_size, hidden),
    ):
        x, out = values(num_rows, size), values(num_rows, num_columns)
        weights = [values(num_columns, size) for _ in range(NUM_LAYERS)]
        ours: list[Call] = [partial(linear, x, w, None, workspace=workspace, out=out) for w in weights]
        library: list[Call] = [partial(multiply_by_library, x, w, out) for w in weights]
        cost = (num_columns * size * DTYPE.itemsize, 2 * num_rows * num_columns * size)
        if is_faster(x, weights[0]):
            yield Case(f"linear {name} {num_rows}", ours, *cost)
        yield Case(f"linear {name} {num_rows}, library", library, *cost)


def multiply_by_library(x: Tensor, weight: Tensor, out: Tensor) -> None:
    torch.mm(x, weight.T, out=out)


def draw_cases(shape: Shape, num_rows: int) -> Iterator[Case]:
    """Yield draws of the next tokens, from all and from the likeliest."""

    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=DEVICE)

    seeds = torch.arange(num_rows, device=DEVICE)
    tokens, largest = column(0, torch.int64), column(0, torch.float32)
    for name, temperature, top_k, top_p in (
        ("the likeliest", 0.0, shape.vocab_size, 1.0),
        ("of all", 0.7, shape.vocab_size, 1.0),
        ("of top-k and top-p", 0.7, 50, 0.95),
    ):
        params = DrawParams(
            temperature=column(temperature, torch.float64),
            top_k=column(top_k, torch.int64),
            top_p=column(top_p, torch.float64),
            min_p=column(0, torch.float64),
            seed=seeds,
            position=seeds,
        )
        calls: list[Call] = []
        for _ in range(NUM_LAYERS):
            logits = 4 * torch.randn(num_rows, shape.vocab_size, device=DEVICE)
            workspace = DrawWorkspace.empty(num_rows, shape.vocab_size, DEVICE)
            calls.append(partial(draw, logits, params, workspace=workspace, tokens=tokens, largest=largest))
        yield Case(f"draw {num_rows} {name}", calls, num_rows * shape.vocab_size * 4)


def values(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def cases(shape: Shape) -> Iterator[Case]:
    """Yield all rows of the table, made one after the other, so that one's memory is free for the next."""
    yield from decode_cases(shape)
    yield from prefill_cases(shape)
    yield from tile_cases(shape)
    for num_rows in (1, 32, 64, 128):
        yield from linear_cases(shape, num_rows)
    for num_rows in (1, 128):
        yield from draw_cases(shape, num_rows)
    for num_tokens in (128, 16384):
        yield from merge_cases(shape, num_tokens)
        yield from row_cases(shape, num_tokens)
        yield from model_cases(shape, num_tokens)


def main() -> None:
    parser = script_parser("kernels", __doc__)
    parser.add_argument("--only", default="", help="run only rows whose names contain this (all)")
    arguments = parser.parse_args()
    rows = {}
    print(f"{'':<42} {'us':>10} {'floor us':>10} {'of floor':>9}")
    for shape in SHAPES:
        for case in cases(shape):
            if arguments.only in case.name:
                seconds, floor, name = seconds_of(case), case.floor, f"{shape.name} {case.name}"
                rows[name] = {"seconds": seconds, "floor": floor, "ratio": floor / seconds}
                print(f"{name:<42} {seconds * 1e6:>10.1f} {floor * 1e6:>10.1f} {floor / seconds:>9.0%}")
    numbers = {
        "bytes_per_second": BYTES_PER_SECOND,
        "flops_per_second": FLOPS_PER_SECOND,
        "torch": torch.__version__,
        "rows": rows,
    }
    print_result("kernels", numbers, save=arguments.save)


if __name__ == "__main__":
    main()
