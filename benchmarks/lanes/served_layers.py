"""Attention for others: a layer waits for queries, attends them, and puts partials for others to read."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

import torch
import triton
import triton.language as tl
from sm_lanes import Lane, Replay, captured, cuts_of
from torch import Tensor

from loong.kernels import Partial, gpu
from loong.kernels.chain import chain_options, follow, let_next_start
from loong.kernels.exchange.signals import now
from loong.kernels.reference import attend_slots
from loong.kernels.slots import SlotLists
from loong.model.config import ModelConfig

NUM_LAYERS = 32  # of a step
NUM_BUFFERS = 4  # of KV, which layers use in turn, so that none is found in a cache
GAP = 100_000  # nanoseconds from the partials of a layer to the queries of the next
MAX_STEPS = 8192
_PROGRAMS_PER_PROCESSOR = 2  # that put
_ROWS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Load:
    """Queries of requests, each with `context` tokens of KV here."""

    num_requests: int
    context: int

    @classmethod
    def parsed(cls, text: str) -> "Load":
        """Parse REQUESTSxCONTEXT."""
        num_requests, context = map(int, text.split("x"))
        return cls(num_requests, context)

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all KV."""
        return self.num_requests * self.context

    def num_bytes(self, config: ModelConfig) -> int:
        """Return the bytes of KV that a layer reads."""
        return self.num_tokens * config.kv_layout().row_bytes


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds from a layer's queries to its partials."""

    mean: float
    median: float
    p99: float
    worst: float
    number: int

    @classmethod
    def of(cls, seconds: list[float]) -> "Latencies":
        """Return those of some layers; all 0 if there are none."""
        ordered = sorted(seconds) or [0.0]
        last = len(ordered) - 1
        p99 = ordered[int(0.99 * last)]
        return cls(mean(ordered), ordered[last // 2], p99, ordered[-1], len(seconds))


class ServedKV:
    """KV of a pool of which only some layers exist, and the times of layers that are served from it."""

    def __init__(self, config: ModelConfig, num_slots: int, device: torch.device) -> None:
        self.config, self._device = config, device
        shape = (num_slots, 2, config.num_kv_heads, config.head_dim)
        self._layers = [
            torch.randn(shape, dtype=config.torch_dtype, device=device) for _ in range(NUM_BUFFERS)
        ]
        self._times = torch.zeros(MAX_STEPS, NUM_LAYERS, 2, dtype=torch.int64, device=device)
        self._num_steps = torch.zeros(1, dtype=torch.int64, device=device)

    def captured(self, load: Load, lane: Lane, gap: int = GAP) -> Replay:
        """Return a replay of a step of served layers in a lane.

        With `gap` 0, one layer follows the other at once.
        """
        return captured(self._call_of(self._step_of(load, lane), gap), lane)

    def error(self, load: Load, lane: Lane) -> float:
        """Return the error of a captured step relative to the definition."""
        step, (kv, scale) = self._step_of(load, lane), (self._layers[-1], self.config.head_dim**-0.5)
        captured(self._call_of(step, GAP), lane)()
        lane.stream.synchronize()
        exact = attend_slots(step.q[-1].float(), kv[: load.num_tokens].float(), step.lists, scale=scale).out
        return float((step.mailbox.out - exact).norm() / exact.norm())

    def _step_of(self, load: Load, lane: Lane) -> "_Step":
        config, device, num_requests = self.config, self._device, load.num_requests
        slots = torch.randperm(load.num_tokens, device=device)
        heads, num_cuts = (config.num_heads, config.head_dim), cuts_of(lane, config.num_kv_heads)
        q = torch.randn(NUM_LAYERS, num_requests, *heads, dtype=config.torch_dtype, device=device)
        part = Partial.empty(num_requests, *heads, device)
        return _Step(
            q=q,
            lists=SlotLists.of(list(torch.split(slots, load.context))),
            part=part,
            workspace=gpu.SplitWorkspace.empty(num_cuts, num_requests, *heads, device),
            mailbox=Partial(torch.empty_like(q[0]), torch.empty_like(part.lse)),
            num_programs=min(num_requests * config.num_heads, _PROGRAMS_PER_PROCESSOR * lane.num_processors),
        )

    def _call_of(self, step: "_Step", gap: int) -> Callable[[], None]:
        scale, num_rows = self.config.head_dim**-0.5, step.part.lse.numel()

        def call() -> None:
            for layer in range(NUM_LAYERS):
                kv, times = self._layers[layer % NUM_BUFFERS], (self._num_steps, self._times, layer)
                if gap:
                    _await_queries[(1,)](*times, gap, NUM_LAYERS, MAX_STEPS, num_warps=1, **chain_options())
                gpu.attend_slots(
                    step.q[layer], kv, step.lists, scale=scale, workspace=step.workspace, out=step.part
                )
                if gap:
                    sizes = num_rows, self.config.head_dim, NUM_LAYERS, MAX_STEPS, _ROWS_AT_ONCE
                    _put[(step.num_programs,)](*step.part, *step.mailbox, *times, *sizes, **chain_options())

        return call

    def reset(self) -> None:
        """Forget all times."""
        self._times.zero_()
        self._num_steps.zero_()
        torch.cuda.synchronize()

    def latencies(self, begin: int = 0, end: int = 1 << 62) -> Latencies:
        """Return the latencies of layers whose times are within some nanoseconds of the device's clock."""
        num_steps = min(int(self._num_steps), MAX_STEPS - 1)
        times = self._times[1 : num_steps + 1].reshape(-1, 2).tolist()
        within = [(put - came) * 1e-9 for came, put in times if begin <= came and put <= end and put]
        return Latencies.of(within)


@dataclass(frozen=True, slots=True)
class _Step:
    """The inputs and outputs of served layers."""

    q: Tensor  # [layers, T, H, D]
    lists: SlotLists
    part: Partial
    workspace: gpu.SplitWorkspace
    mailbox: Partial  # of the queries' dtype, as partials travel
    num_programs: int  # that put


@triton.jit(do_not_specialize=["layer", "gap"])  # type: ignore[untyped-decorator]  # Triton's own
def _await_queries(
    num_steps: tl.tensor,
    times: tl.tensor,
    layer: tl.tensor,
    gap: tl.tensor,
    num_layers: tl.constexpr,
    max_steps: tl.constexpr,
    is_chained: tl.constexpr,
) -> None:
    """Wait, as for a flag, and note the time; the first layer of a step counts it."""
    follow(is_chained)
    polls = tl.full((), 0, tl.int64)
    step = tl.load(num_steps) + (layer == 0)
    begin = now(polls)
    time = begin
    while time - begin < gap:
        polls += 1
        time = now(polls)
    tl.debug_barrier()
    tl.store(num_steps, step)
    tl.store(times + ((step % max_steps) * num_layers + layer) * 2, time)


@triton.jit(do_not_specialize=["layer", "num_rows"])  # type: ignore[untyped-decorator]  # as above
def _put(
    out: tl.tensor,
    lse: tl.tensor,
    out_there: tl.tensor,
    lse_there: tl.tensor,
    num_steps: tl.tensor,
    times: tl.tensor,
    layer: tl.tensor,
    num_rows: tl.tensor,
    head_dim: tl.constexpr,
    num_layers: tl.constexpr,
    max_steps: tl.constexpr,
    at_once: tl.constexpr,
    is_chained: tl.constexpr,
) -> None:
    """Copy partials, rows of a token and a head, in the dtype in which they travel, and note the time."""
    let_next_start(is_chained)
    follow(is_chained)
    dim = tl.arange(0, head_dim)
    for first in tl.range(tl.program_id(0) * at_once, num_rows, tl.num_programs(0) * at_once):
        row = first + tl.arange(0, at_once)
        element = row[:, None] * head_dim + dim[None, :]
        tl.store(
            out_there + element, tl.load(out + element, (row < num_rows)[:, None]), (row < num_rows)[:, None]
        )
        tl.store(lse_there + row, tl.load(lse + row, row < num_rows), row < num_rows)
    tl.debug_barrier()
    step = tl.load(num_steps)
    time = now(tl.full((), 1, tl.int64))
    tl.atomic_max(times + ((step % max_steps) * num_layers + layer) * 2 + 1, time)
