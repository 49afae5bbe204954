"""Attention on an NVIDIA GPU: by Triton's kernels, and by a library's for large tiles."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, groupby, product

import torch
from torch import Tensor

from loong.core.attention_kernels import AttentionKernels
from loong.kernels import Partial, gpu
from loong.kernels.attend_task import AttendTask
from loong.kernels.attention import lightllm_decode
from loong.kernels.kv_rows import num_kv_heads_of
from loong.kernels.shared_table import SharedTable
from loong.kernels.slots import SlotLists
from loong.model.attention_kernels import tile_kernel
from loong.model.device import AttendTable
from loong.model.launches import Launches
from loong.model.short_kernels import keys_of_turn, turns_of
from loong.model.tiles import Cut, Tile, TileSizes, best_num_pieces, cut_tiles

_LEAST_CUT = 8192  # keys of a task, from which cutting them into pieces is faster
_MANY_QUERIES = 1024  # of the longest tasks, whose many tiles leave little idle at the end
_TILE_LAUNCHES, _TURN_LAUNCHES = 4, 2  # about, of a tile of attention, and of a turn after the first


class CudaAttention:
    """The methods of a Device that attend.

    `dtype` is the model's: no library takes float32. `sizes` are those of the tiles that were measured for
    the library that `kernels` choose. `upload` copies a table to the device.
    """

    def __init__(
        self,
        torch_device: torch.device,
        dtype: torch.dtype,
        sizes: TileSizes | None,
        kernels: AttentionKernels,
        launches: Launches,
        upload: Callable[[Tensor], Tensor],
    ) -> None:
        self._device, self._launches, self._upload = torch_device, launches, upload
        self._tiles = tile_kernel(kernels, dtype, torch_device)
        self._sizes = None if self._tiles is None else sizes or self._tiles.sizes
        self._has_lightllm = kernels is AttentionKernels.LIGHTLLM and dtype in lightllm_decode.DTYPES
        self._num_processors = torch.cuda.get_device_properties(torch_device).multi_processor_count
        self._workspaces: dict[
            int, gpu.SplitWorkspace
        ] = {}  # by capacity; kept because graphs use their memory
        self._piece_workspaces: dict[int, gpu.PieceWorkspace] = {}  # by head dim; kept as well

    def attend_slots(self, q: Tensor, kv: Tensor, lists: SlotLists, *, scale: float, out: Partial) -> None:
        """See Device."""
        if self._has_lightllm and q.shape[2] in lightllm_decode.HEAD_DIMS and len(q):
            lightllm_decode.attend_slots(q, kv, lists, scale=scale, out=out)
            return
        workspace = self._workspace(q, num_kv_heads_of(kv, q.shape[2]))
        gpu.attend_slots(q, kv, lists, scale=scale, workspace=workspace, out=out)

    def attend_shared(
        self, q: Tensor, kv: Tensor, table: SharedTable, *, scale: float, total: Partial
    ) -> None:
        """See Device."""
        workspace = self._piece_workspace(q.shape[2])
        gpu.attend_shared(q, kv, table, scale=scale, total=total, workspace=workspace)

    def table(self, tasks: Sequence[AttendTask], window: int | None) -> AttendTable:
        """See Device. On a shared device each turn is short. Libraries compute no windows."""
        is_shared = self._launches.is_shared
        sizes = None if is_shared or window is not None else self._sizes
        tiles, rest = cut = cut_tiles(tasks, sizes) if sizes else Cut((), tuple(tasks))
        most_keys = max([1, *(task.num_keys for task in rest)])
        num_queries = sum(task.num_queries for task in rest if 2 * task.num_keys > most_keys)
        turns = turns_of(rest, keys_of_turn(rest) if is_shared else most_keys)
        lines = torch.tensor(list(chain.from_iterable(turns)), dtype=torch.int64)
        tables = torch.split(self._upload(lines.view(-1, len(AttendTask._fields))), list(map(len, turns)))
        is_cut = most_keys >= _LEAST_CUT and num_queries < _MANY_QUERIES
        return AttendTable(tables, tiles, cut.is_merged or len(turns) > 1, is_cut, window)

    def attend_blocks(
        self, q: Tensor, kv: Tensor, table: AttendTable, *, scale: float, total: Partial, slots: Tensor | None
    ) -> None:
        """See Device."""
        is_cut = table.is_cut or slots is not None
        workspace = self._piece_workspace(q.shape[2]) if is_cut else None
        for number, tasks in enumerate(table.turns):
            gpu.attend_blocks(
                q,
                kv,
                tasks,
                scale=scale,
                total=total,
                slots=slots,
                workspace=workspace,
                window=table.window,
            )
            if number:  # the first is among the others
                self._launches.add(_TURN_LAUNCHES)
        for (row, num_keys), tiles in groupby(table.tiles, key=lambda tile: (tile.key_row, tile.num_keys)):
            keys = slice(row, row + num_keys)
            its_kv = kv[keys] if slots is None else kv[slots[keys]]
            for tile in tiles:
                self._attend_rows(q, its_kv, tile, scale, total)
                self._launches.add(_TILE_LAUNCHES)

    def plan(self, q: Tensor, kv: Tensor, windows: Sequence[int | None], use: Callable[[], None]) -> None:
        """Do what Device.plan_attention does, in threads that `use` prepares.

        It loads the kernels for all kinds of tables, and a library plans shapes of tiles. The kernels that
        merge pieces are loaded as well.
        """
        nothing = self._upload(torch.zeros(1, len(AttendTask._fields), dtype=torch.int64))
        self._piece_workspace(q.shape[2])  # one for all threads

        def load(size: int, kind: tuple[bool, bool, int | None]) -> None:
            is_merged, is_cut, window = kind
            queries, keys = _zeros_like(q, size), _zeros_like(kv, size)
            total, table = (
                Partial.unseen(queries, is_merged=is_merged),
                AttendTable((nothing,), is_cut=is_cut, window=window),
            )
            for slots in (None, nothing[0]) if is_cut else (None,):
                self.attend_blocks(queries, keys, table, scale=1.0, total=total, slots=slots)

        kinds = list(product((False, True), (False, True), windows))
        with ThreadPoolExecutor(initializer=use) as threads:  # Triton compiles mostly outside of Python
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

    def _workspace(self, q: Tensor, num_kv_heads: int) -> gpu.SplitWorkspace:
        room = next((room for room in sorted(self._workspaces) if room >= len(q)), None)
        if room is None:
            room = 1 << (len(q) - 1).bit_length() if len(q) else 1
            num_cuts, (_, num_heads, head_dim) = gpu.best_num_cuts(num_kv_heads, self._device), q.shape
            self._workspaces[room] = gpu.SplitWorkspace.empty(
                num_cuts, room, num_heads, head_dim, self._device
            )
        return self._workspaces[room]

    def _piece_workspace(self, head_dim: int) -> gpu.PieceWorkspace:
        if head_dim not in self._piece_workspaces:
            self._piece_workspaces[head_dim] = gpu.PieceWorkspace.empty(
                self._num_processors, head_dim, self._device
            )
        return self._piece_workspaces[head_dim]


def _zeros_like(rows: Tensor, num_rows: int) -> Tensor:
    """Return another number of such rows, all zeros."""
    return rows.new_zeros(num_rows, *rows.shape[1:])


def num_pieces_on(q: Tensor, num_keys: int) -> int:
    """Return `best_num_pieces` for q [T, H, D] and `num_keys` keys, on q's GPU."""
    num_processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    return best_num_pieces(len(q), q.shape[1], num_keys, num_processors)
