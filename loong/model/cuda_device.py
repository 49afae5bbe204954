"""An NVIDIA GPU and its kernels: Triton's, and a library's for large tiles of attention."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain, groupby, product
from threading import Lock

import torch
from torch import Tensor
from torch.nn import functional as F

from loong.core.attention_kernels import AttentionKernels
from loong.kernels import Partial, gpu
from loong.kernels.attend_task import AttendTask
from loong.kernels.attention import lightllm_decode
from loong.kernels.expert_groups import ExpertGroups
from loong.kernels.launch_queue import LaunchQueue
from loong.kernels.shared_table import SharedTable
from loong.kernels.slots import SlotLists
from loong.model.attention_kernels import tile_kernel
from loong.model.device import AttendTable
from loong.model.quantization.fp8 import Fp8Matrix
from loong.model.quantization.product import fp8_product
from loong.model.short_kernels import SHORT_ROWS, keys_of_turn, short_width, turns_of
from loong.model.tiles import Cut, Tile, TileSizes, best_num_pieces, cut_tiles

_LEAST_CUT = 8192  # keys of a task, from which cutting them into pieces is faster
_MANY_QUERIES = 1024  # of the longest tasks, whose many tiles leave little idle at the end
# Launches, about: of a tile of attention, of a turn after the first, and of what else comes between two norms
# besides products.
_TILE_LAUNCHES, _TURN_LAUNCHES, _OTHER_LAUNCHES = 4, 2, 12
_GROUPING_LAUNCHES = 10  # about, for each of two products of experts: to choose and to sort, and the product


class CudaDevice:
    """See Device.

    `dtype` is the model's: no library takes float32. `sizes` are those of the tiles that were measured for
    the library that `kernels` choose.
    """

    def __init__(
        self,
        index: int,
        dtype: torch.dtype,
        sizes: TileSizes | None = None,
        kernels: AttentionKernels = AttentionKernels.AUTO,
    ) -> None:
        self.torch_device = torch.device("cuda", index)
        self._tiles = tile_kernel(kernels, dtype, self.torch_device)
        self._sizes = None if self._tiles is None else sizes or self._tiles.sizes
        self._has_lightllm = kernels is AttentionKernels.LIGHTLLM
        self._workspaces: dict[
            int, gpu.SplitWorkspace
        ] = {}  # by capacity; kept because graphs use their memory
        self._piece_workspaces: dict[int, gpu.PieceWorkspace] = {}  # by head dim; kept as well
        self._num_processors = torch.cuda.get_device_properties(self.torch_device).multi_processor_count
        self._linear_workspace = gpu.LinearWorkspace.empty(self._num_processors, self.torch_device)
        self._is_capturing = False
        self._is_shared = False  # for the present batch
        self._was_shared = False  # at any time since it began, so also for the next
        self._num_sharers, self._sharing = 0, Lock()
        self._queue = LaunchQueue(partial(torch.cuda.current_stream, index))
        self.stream: torch.cuda.Stream | None = None  # of all its work; None: any

    def use(self) -> None:
        """See Device."""
        torch.cuda.set_device(self.torch_device)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Return a context for a captured step and its trial run, in which launches cost the host nothing.

        Matrix products are computed in parts, since the step may share the device.
        """
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """See Device. Matrix products and attention are computed in parts, without cuDNN's long kernels."""
        with self._sharing:
            self._num_sharers += 1
            self._is_shared = self._was_shared = True
        try:
            yield
        finally:
            with self._sharing:
                self._num_sharers -= 1

    def next_batch(self) -> None:
        """See Device.

        Between two leases there is a gap, in which a chunk often begins. The host launches most of it then.
        """
        with self._sharing:
            self._is_shared, self._was_shared = self._was_shared, self._num_sharers > 0

    def upload(self, tensor: Tensor) -> Tensor:
        """See Device."""
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def host_words(self, num_words: int) -> Tensor:
        """See Device."""
        return torch.zeros(num_words, dtype=torch.int64, device="cpu", pin_memory=True)

    def wait(self) -> None:
        """See Device."""
        torch.cuda.current_stream().synchronize()

    def calling(self, meanwhile: Callable[[], None]) -> AbstractContextManager[None]:
        """See Device."""
        return self._queue.calling(meanwhile)

    def keep_memory(self, num_bytes: int) -> None:
        """See Device. The driver may wait for the device before it gives memory.

        Then the device may be in a step that waits for another process, whose driver waits in the same way.
        """
        num_free, _ = torch.cuda.mem_get_info()
        torch.empty(min(num_bytes, num_free // 2), dtype=torch.uint8, device=self.torch_device)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See Device. The kernel for few rows is faster, except when the host must launch it."""
        if self._is_capturing and gpu.is_faster(x, weight):
            out = x.new_empty(len(x), len(weight))
            gpu.linear(x, weight, bias, workspace=self._linear_workspace, out=out)
            return out
        if self._is_capturing or self._is_shared:
            return self._linear_in_parts(x, weight, bias)
        self._launched(1)
        return F.linear(x, weight, bias)

    def load_products(self, weight: Tensor, bias: Tensor | None, most_rows: int) -> None:
        """See Device.

        cuBLAS chooses a kernel by the size, and loads it at its first use. Then the driver waits for all work
        of the device, such as a step that waits for another process. So parts have all their sizes here.
        Whole products have most: they are computed while no step of others is served.
        """
        rows = torch.zeros(most_rows, weight.shape[1], dtype=weight.dtype, device=self.torch_device)
        for num_rows in range(1, min(most_rows, SHORT_ROWS) + 1):
            self._linear_in_parts(rows[:num_rows], weight, bias)
        for num_rows in _numbers_of_rows(most_rows):
            self.linear(rows[:num_rows], weight, bias)

    def grouped_linear(self, x: Tensor, weight: Tensor, groups: ExpertGroups) -> Tensor:
        """See Device."""
        out = x.new_empty(len(groups.pairs), weight.shape[1])
        gpu.grouped_linear(x, weight, groups, out=out)
        self._launched(_GROUPING_LAUNCHES)
        return out

    def fp8_linear(self, x: Tensor, weight: Fp8Matrix, groups: ExpertGroups | None = None) -> Tensor:
        """See Device."""
        self._launched(_GROUPING_LAUNCHES if groups else 2)
        return fp8_product(x, weight, groups, gpu.quantize_rows, gpu.fp8_linear)

    def expert_sum(self, parts: Tensor, weights: Tensor, *, out: Tensor) -> None:
        """See Device."""
        gpu.expert_sum(parts, weights, out=out)

    def add_rms_norm(
        self, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor, added: Tensor | None
    ) -> None:
        """See Device."""
        gpu.add_rms_norm(residual, weight, eps, out=out, added=added)
        self._launched(_OTHER_LAUNCHES)

    def silu_and_mul(self, gate_up: Tensor, *, out: Tensor) -> None:
        """See Device."""
        gpu.silu_and_mul(gate_up, out=out)

    def rotate_and_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        q: Tensor,
        kv: Tensor,
        rows: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> None:
        """See Device."""
        gpu.rotate_and_store(qkv, cos, sin, q=q, kv=kv, rows=rows, q_norm=q_norm, k_norm=k_norm, eps=eps)

    def copy_rows(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_rows: Tensor | None,
        target_rows: Tensor | None,
        num_rows: Tensor | None = None,
    ) -> None:
        """See Device."""
        gpu.copy_rows(source, target, source_rows=source_rows, target_rows=target_rows, num_rows=num_rows)

    def merge_into(self, total: Partial, parts: Partial, rows: Tensor) -> None:
        """See Device."""
        gpu.merge_into(total, parts, rows)

    def attend_slots(self, q: Tensor, kv: Tensor, lists: SlotLists, *, scale: float, out: Partial) -> None:
        """See Device."""
        if self._has_lightllm and q.shape[2] in lightllm_decode.HEAD_DIMS and len(q):
            lightllm_decode.attend_slots(q, kv, lists, scale=scale, out=out)
            return
        workspace = self._workspace(q, kv.shape[2])
        gpu.attend_slots(q, kv, lists, scale=scale, workspace=workspace, out=out)

    def attend_shared(
        self, q: Tensor, kv: Tensor, table: SharedTable, *, scale: float, total: Partial
    ) -> None:
        """See Device."""
        workspace = self._piece_workspace(q.shape[2])
        gpu.attend_shared(q, kv, table, scale=scale, total=total, workspace=workspace)

    def table(self, tasks: Sequence[AttendTask]) -> AttendTable:
        """See Device. On a shared device each turn is short."""
        sizes = None if self._is_shared else self._sizes
        tiles, rest = cut = cut_tiles(tasks, sizes) if sizes else Cut((), tuple(tasks))
        most_keys = max([1, *(task.num_keys for task in rest)])
        num_queries = sum(task.num_queries for task in rest if 2 * task.num_keys > most_keys)
        turns = turns_of(rest, keys_of_turn(rest) if self._is_shared else most_keys)
        lines = torch.tensor(list(chain.from_iterable(turns)), dtype=torch.int64)
        tables = torch.split(self.upload(lines.view(-1, len(AttendTask._fields))), list(map(len, turns)))
        is_cut = most_keys >= _LEAST_CUT and num_queries < _MANY_QUERIES
        return AttendTable(tables, tiles, cut.is_merged or len(turns) > 1, is_cut)

    def attend_blocks(
        self,
        q: Tensor,
        kv: Tensor,
        table: AttendTable,
        *,
        scale: float,
        total: Partial,
        slots: Tensor | None = None,
    ) -> None:
        """See Device."""
        is_cut = table.is_cut or slots is not None
        workspace = self._piece_workspace(q.shape[2]) if is_cut else None
        for number, tasks in enumerate(table.turns):
            gpu.attend_blocks(q, kv, tasks, scale=scale, total=total, slots=slots, workspace=workspace)
            if number:  # the first is among the others
                self._launched(_TURN_LAUNCHES)
        for (row, num_keys), tiles in groupby(table.tiles, key=lambda tile: (tile.key_row, tile.num_keys)):
            keys = slice(row, row + num_keys)
            its_kv = kv[keys] if slots is None else kv[slots[keys]]
            for tile in tiles:
                self._attend_rows(q, its_kv, tile, scale, total)
                self._launched(_TILE_LAUNCHES)

    def plan_attention(self, q: Tensor, kv: Tensor) -> None:
        """See Device. It loads the kernels for all kinds of tables, and a library plans shapes of tiles.

        The kernels that merge pieces are loaded as well.
        """
        nothing = self.upload(torch.zeros(1, len(AttendTask._fields), dtype=torch.int64))
        self._piece_workspace(q.shape[2])  # one for all threads

        def load(size: int, kind: tuple[bool, bool]) -> None:
            is_merged, is_cut = kind
            queries, keys = _zeros_like(q, size), _zeros_like(kv, size)
            total, table = (
                Partial.unseen(queries, is_merged=is_merged),
                AttendTable((nothing,), is_cut=is_cut),
            )
            for slots in (None, nothing[0]) if is_cut else (None,):
                self.attend_blocks(queries, keys, table, scale=1.0, total=total, slots=slots)

        kinds = list(product((False, True), repeat=2))
        with ThreadPoolExecutor(initializer=self.use) as threads:  # Triton compiles mostly outside of Python
            for size in (1, _LEAST_CUT):  # in turn: some kernels serve both
                list(threads.map(partial(load, size), kinds))
        for shape in self._planned_shapes():
            queries, keys = _zeros_like(q, shape.num_queries), _zeros_like(kv, shape.num_keys)
            is_merged = not shape.is_causal
            self._attend_rows(queries, keys, shape, 1.0, Partial.unseen(queries, is_merged=is_merged))

    def _planned_shapes(self) -> Iterable[Tile]:
        """Return the shapes of tiles to compute once at the start: all that are planned, or one of a kind."""
        if self._tiles is None or self._sizes is None:
            return ()
        shapes = self._sizes.shapes()
        return shapes if self._tiles.is_planned else {tile.is_causal: tile for tile in shapes}.values()

    def _attend_rows(self, q: Tensor, kv: Tensor, tile: Tile, scale: float, total: Partial) -> None:
        """Merge attention of a tile's queries over its keys kv [S, 2, K, D] into `total`, which has all
        queries.
        """
        assert self._tiles is not None, "tables without a library have no tiles"
        queries = slice(tile.query_row, tile.query_row + tile.num_queries)
        num_pieces = 1 if tile.is_causal else num_pieces_on(q[queries], len(kv))
        part = self._tiles.attend(q[queries], kv, scale, is_causal=tile.is_causal, num_pieces=num_pieces)
        out, lse, rows = part.out[:, tile.num_extra :], part.lse[:, tile.num_extra :], tile.rows
        if total.out.dtype == q.dtype:  # these queries see no other keys
            total.out[rows], total.lse[rows] = out[0], lse[0]
        else:
            gpu.merge_into(Partial(total.out[rows], total.lse[rows]), Partial(out, lse))

    def _linear_in_parts(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return a linear layer of x [T, I], by kernels of few rows and columns each."""
        out = x.new_empty(len(x), len(weight))
        for rows, target in zip(torch.split(x, SHORT_ROWS), torch.split(out, SHORT_ROWS), strict=True):
            num_columns = short_width(len(rows))
            for first in range(0, len(weight), num_columns):
                columns = slice(first, first + num_columns)
                if bias is None:
                    torch.mm(rows, weight[columns].T, out=target[:, columns])
                else:
                    torch.addmm(bias[columns], rows, weight[columns].T, out=target[:, columns])
                self._launched(1)
        return out

    def _launched(self, num_launches: int) -> None:
        """Wait, if need be, until a step that is launched by the host is not too far ahead of the device."""
        if not self._is_capturing:
            self._queue.add(num_launches)

    def _workspace(self, q: Tensor, num_kv_heads: int) -> gpu.SplitWorkspace:
        room = next((room for room in sorted(self._workspaces) if room >= len(q)), None)
        if room is None:
            room = 1 << (len(q) - 1).bit_length() if len(q) else 1
            num_cuts, (_, num_heads, head_dim) = gpu.best_num_cuts(num_kv_heads, self.torch_device), q.shape
            self._workspaces[room] = gpu.SplitWorkspace.empty(
                num_cuts, room, num_heads, head_dim, self.torch_device
            )
        return self._workspaces[room]

    def _piece_workspace(self, head_dim: int) -> gpu.PieceWorkspace:
        if head_dim not in self._piece_workspaces:
            self._piece_workspaces[head_dim] = gpu.PieceWorkspace.empty(
                self._num_processors, head_dim, self.torch_device
            )
        return self._piece_workspaces[head_dim]


def _zeros_like(rows: Tensor, num_rows: int) -> Tensor:
    """Return another number of such rows, all zeros."""
    return rows.new_zeros(num_rows, *rows.shape[1:])


def _numbers_of_rows(most: int) -> Iterator[int]:
    """Yield numbers up to `most`, so close that a product of another number mostly has the kernel of one."""
    yield from (number for number in (1, 2, 4) if number <= most)
    yield from range(8, min(most, SHORT_ROWS) + 1, 8)
    yield from range(SHORT_ROWS + 64, most + 1, 64)


def num_pieces_on(q: Tensor, num_keys: int) -> int:
    """Return `best_num_pieces` for q [T, H, D] and `num_keys` keys, on q's GPU."""
    num_processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    return best_num_pieces(len(q), q.shape[1], num_keys, num_processors)


class ServiceDevice(CudaDevice):
    """A GPU for work that serves others while all other work goes on.

    It has a stream of high priority, which the threads that use it work on, and workspaces of its own. cuDNN
    is not used: it plans once for each thread.
    """

    def __init__(self, index: int) -> None:
        super().__init__(index, torch.float32)
        self.stream: torch.cuda.Stream = torch.cuda.Stream(index, priority=-1)  # type: ignore[no-untyped-call]  # torch's own

    def use(self) -> None:
        """See Device."""
        super().use()
        torch.cuda.set_stream(self.stream)
