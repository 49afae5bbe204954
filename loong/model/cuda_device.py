"""An NVIDIA GPU and its kernels: Triton's, and cuDNN's for long causal squares."""

from collections.abc import Sequence

import torch
from torch import Tensor

from loong.kernels import Partial, gpu
from loong.kernels.attend_task import AttendTask
from loong.kernels.slots import SlotLists
from loong.model.device import AttendTable
from loong.model.squares import cut_squares

SQUARE_STEP = 8192  # sizes of squares: each takes cuDNN 60 ms to plan, once, and below 8192 Triton is quicker


class CudaDevice:
    """See Device. `dtype` is the model's: cuDNN takes no float32."""

    def __init__(self, index: int, dtype: torch.dtype) -> None:
        self.torch_device = torch.device("cuda", index)
        self._has_squares = dtype != torch.float32
        self._workspaces: dict[int, gpu.SplitWorkspace] = {}  # by room; kept, for graphs hold their memory

    def use(self) -> None:
        """See Device."""
        torch.cuda.set_device(self.torch_device)

    def upload(self, tensor: Tensor) -> Tensor:
        """See Device."""
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def wait(self) -> None:
        """See Device."""
        torch.cuda.current_stream().synchronize()

    def add_rms_norm(
        self, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor, added: Tensor | None
    ) -> None:
        """See Device."""
        gpu.add_rms_norm(residual, weight, eps, out=out, added=added)

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
        self, source: Tensor, target: Tensor, *, source_rows: Tensor | None, target_rows: Tensor | None
    ) -> None:
        """See Device."""
        gpu.copy_rows(source, target, source_rows=source_rows, target_rows=target_rows)

    def merge_into(self, total: Partial, parts: Partial, rows: Tensor) -> None:
        """See Device."""
        gpu.merge_into(total, parts, rows)

    def attend_slots(self, q: Tensor, kv: Tensor, lists: SlotLists, *, scale: float, out: Partial) -> None:
        """See Device."""
        workspace = self._workspace(q, kv.shape[2])
        gpu.attend_slots(q, kv, lists, scale=scale, workspace=workspace, out=out)

    def table(self, tasks: Sequence[AttendTask]) -> AttendTable:
        """See Device."""
        squares, others = cut_squares(tasks, SQUARE_STEP) if self._has_squares else ((), tuple(tasks))
        lines = torch.tensor(others, dtype=torch.int64).view(-1, len(AttendTask._fields))
        return AttendTable(self.upload(lines), squares)

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
        if len(table.tasks):
            gpu.attend_blocks(q, kv, table.tasks, scale=scale, total=total, slots=slots)
        for square in table.squares:
            keys = kv[square.key_row : square.key_row + square.size]
            if slots is not None:
                keys = kv[slots[square.key_row : square.key_row + square.size]]
            rows = slice(square.query_row, square.query_row + square.size)
            _attend_square(q[rows], keys, scale, Partial(total.out[rows], total.lse[rows]))

    def nothing_seen(self, q: Tensor, *, is_merged: bool) -> Partial:
        """See Device."""
        out = torch.empty_like(q, dtype=torch.float32 if is_merged else q.dtype)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
        return Partial(out, lse)

    def _workspace(self, q: Tensor, num_kv_heads: int) -> gpu.SplitWorkspace:
        room = next((room for room in sorted(self._workspaces) if room >= len(q)), None)
        if room is None:
            room = 1 << (len(q) - 1).bit_length() if len(q) else 1
            num_cuts, (_, num_heads, head_dim) = gpu.best_num_cuts(num_kv_heads, self.torch_device), q.shape
            self._workspaces[room] = gpu.SplitWorkspace.empty(
                num_cuts, room, num_heads, head_dim, self.torch_device
            )
        return self._workspaces[room]


def _attend_square(q: Tensor, kv: Tensor, scale: float, total: Partial) -> None:
    """Merge causal attention of q [S, H, D] over kv [S, 2, K, D] into `total`; all of it, in q's dtype."""
    k, v = (part.transpose(0, 1)[None] for part in kv.unbind(1))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q.transpose(0, 1)[None], k, v, None, True, 0.0, True, False, scale=scale
    )
    out = out[0].transpose(0, 1)  # [S, H, D]
    if total.out.dtype == out.dtype:
        total.out.copy_(out)
    else:
        gpu.merge_into(total, Partial(out[None], lse.view(1, *lse.shape[1:3]).transpose(1, 2)))
