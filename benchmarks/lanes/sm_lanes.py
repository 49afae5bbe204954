"""Parts of a GPU's multiprocessors, each with a stream whose kernels run only on them, captured or not.

Needs the driver's green contexts (CUDA 12.4 or later).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, TypeAlias  # Any: the driver's own types

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import smid

from loong.core.attention_kernels import AttentionKernels
from loong.kernels import Partial, gpu
from loong.kernels.attend_task import AttendTask
from loong.kernels.exchange.signals import now
from loong.model.cuda_attention import CudaAttention
from loong.model.cuda_device import CudaDevice
from loong.model.device import AttendTable
from loong.model.launches import Launches

MAX_STAMPS = 1 << 20

Replay: TypeAlias = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Lane:
    """A stream, its multiprocessors, and the way its chunks attend, for the sake of work on other streams.

    They attend `by_blocks`: by a kernel whose programs are short, also where a faster one exists. Or they do
    so `in_turns`, as in steps that the host launches while an instance serves. `is_cut` says whether keys are
    cut into pieces (None: as workers do).
    """

    stream: torch.cuda.Stream
    num_processors: int
    by_blocks: bool = False
    in_turns: bool = False
    is_cut: bool | None = None


def whole(index: int, priority: int = 0) -> Lane:
    """Return a lane of all multiprocessors; a lower `priority` goes first."""
    count = torch.cuda.get_device_properties(index).multi_processor_count
    return Lane(torch.cuda.Stream(index, priority), count)  # type: ignore[no-untyped-call]  # torch's own


@cache
def split(index: int, num_processors: int) -> tuple[Lane, Lane]:
    """Return a lane of `num_processors` multiprocessors, a multiple of 8, and one of the rest."""
    from cuda.bindings import driver  # not at the top: it needs a GPU's driver

    torch.cuda.synchronize(index)  # makes the context that green ones derive from
    device = _checked(driver.cuDeviceGet(index))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    all_of_it = _checked(driver.cuDeviceGetDevResource(device, kind))
    parts, _, rest = _checked(driver.cuDevSmResourceSplitByCount(1, all_of_it, 0, num_processors))

    def lane(resource: Any) -> Lane:
        description = _checked(driver.cuDevResourceGenerateDesc([resource], 1))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = _checked(driver.cuGreenCtxCreate(description, device, flags))
        no_waits = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = int(_checked(driver.cuGreenCtxStreamCreate(context, no_waits, 0)))
        return Lane(torch.cuda.get_stream_from_external(stream, index), int(resource.sm.smCount))

    return lane(parts[0]), lane(rest)


class LaneAttention(CudaAttention):
    """Attention within a lane."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        lane: Lane,
        launches: Launches,
        upload: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(device, dtype, None, AttentionKernels.AUTO, launches, upload)
        self._lane, self._num_processors = lane, lane.num_processors
        if lane.by_blocks:
            self._sizes = None

    def table(self, tasks: Sequence[AttendTask], window: int | None) -> AttendTable:
        """See Device."""
        table, is_cut = super().table(tasks, window), self._lane.is_cut
        return table if is_cut is None else table._replace(is_cut=is_cut)

    def _workspace(self, q: Tensor, num_kv_heads: int) -> gpu.SplitWorkspace:
        if len(q) not in self._workspaces:
            num_cuts = cuts_of(self._lane, num_kv_heads)
            _, num_heads, head_dim = q.shape
            self._workspaces[len(q)] = gpu.SplitWorkspace.empty(
                num_cuts, len(q), num_heads, head_dim, q.device
            )
        return self._workspaces[len(q)]


class LaneDevice(CudaDevice):
    """A GPU within a lane."""

    def __init__(self, index: int, dtype: torch.dtype, lane: Lane) -> None:
        super().__init__(index, dtype)
        self._attention = LaneAttention(self.torch_device, dtype, lane, self._launches, self.upload)
        self._linear_workspace = gpu.LinearWorkspace.empty(lane.num_processors, self.torch_device)
        self._launches.is_shared = lane.in_turns


def cuts_of(lane: Lane, num_kv_heads: int) -> int:
    """Return the number of cuts of KV that fills a lane once."""
    return max(1, 2 * lane.num_processors // num_kv_heads)


def captured(call: Callable[[], None], lane: Lane) -> Replay:
    """Return a replay of `call` in a lane, as one graph; `call` is run once before."""
    torch.cuda.synchronize()  # its inputs have been made on other streams
    with torch.cuda.stream(lane.stream):
        call()
        lane.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=lane.stream):
            call()

    def replay(_memory: Callable[[], None] = call) -> None:  # which the graph reads, too
        with torch.cuda.stream(lane.stream):
            graph.replay()

    return replay


def _checked(result: tuple[Any, ...]) -> Any:
    """Return the result of a driver's call. Raises `RuntimeError` if it failed."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"the driver answered {status!r}")
    return values[0] if len(values) == 1 else values


class Stamps:
    """Times of the device's clock, in the order in which they are requested."""

    def __init__(self, device: torch.device) -> None:
        self._times = torch.zeros(MAX_STAMPS, dtype=torch.int64, device=device)
        self._count = 0
        torch.cuda.synchronize()

    def put(self, lane: Lane) -> None:
        """Record the time when the lane reaches this point."""
        with torch.cuda.stream(lane.stream):
            _stamp[(1,)](self._times, self._count, num_warps=1)
        self._count += 1

    def take(self, lane: Lane) -> list[int]:
        """Return the nanoseconds of all since the last call, once the lane has done all its work."""
        lane.stream.synchronize()
        times, self._count = self._times[: self._count].tolist(), 0
        return times


@triton.jit(do_not_specialize=["index"])  # type: ignore[untyped-decorator]  # Triton's own
def _stamp(times: tl.tensor, index: tl.tensor) -> None:
    tl.store(times + index, now(index.to(tl.int64)))


def seconds_of(replay: Replay, lane: Lane, stamps: Stamps, count: int) -> list[float]:
    """Return the seconds of each of `count` replays in a row, after one that does not count."""
    replay()
    stamps.put(lane)
    for _ in range(count):
        replay()
        stamps.put(lane)
    times = stamps.take(lane)
    return [(later - earlier) * 1e-9 for earlier, later in pairwise(times)]


def times_beside(
    replay: Replay, lane: Lane, stamps: Stamps, count: int, other: Callable[[], None]
) -> list[int]:
    """Return when each of `count` replays ended, in nanoseconds, while `other` was called repeatedly.

    A thread launches the replays, because a graph of thousands of kernels blocks its launcher.
    """

    def launch() -> None:
        torch.cuda.set_device(lane.stream.device)
        for _ in range(count):
            replay()
            stamps.put(lane)
        lane.stream.synchronize()

    with ThreadPoolExecutor(1) as thread:
        launching = thread.submit(launch)
        while not launching.done():
            other()
        launching.result()
    return stamps.take(lane)


def processors_seen(lane: Lane, device: torch.device) -> int:
    """Return on how many multiprocessors the programs of a captured kernel are seen."""
    seen = torch.zeros(1024, dtype=torch.int32, device=device)

    def look() -> None:
        _look[(8192,)](seen, 2000, num_warps=4)

    captured(look, lane)()
    lane.stream.synchronize()
    return int(seen.sum())


@triton.jit  # type: ignore[untyped-decorator]  # as above
def _look(seen: tl.tensor, nanoseconds: tl.constexpr) -> None:
    polls = tl.full((), 0, tl.int64)
    begin = now(polls)
    while now(polls) - begin < nanoseconds:
        polls += 1
    tl.store(seen + smid(), 1)


def empty_like_q(q: Tensor) -> Partial:
    """Return room for attention of q [T, H, D] that is not merged with anything."""
    return Partial(torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device))
