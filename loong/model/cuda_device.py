"""An NVIDIA GPU and its kernels: Triton's, and a library's for large tiles of attention."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from loong.core.activation import Activation
from loong.core.attention_kernels import AttentionKernels
from loong.kernels import Partial, gpu
from loong.kernels.attend_task import AttendTask
from loong.kernels.expert_groups import ExpertGroups
from loong.kernels.shared_table import SharedTable
from loong.kernels.slots import SlotLists
from loong.model.cuda_attention import CudaAttention
from loong.model.device import AttendTable, empty_choice
from loong.model.launches import Launches
from loong.model.quantization.fp8 import Fp8Matrix
from loong.model.quantization.product import fp8_product
from loong.model.short_kernels import SHORT_ROWS, short_width
from loong.model.tiles import TileSizes

_OTHER_LAUNCHES = 12  # about, of what comes between two norms besides products and attention
_GROUPING_LAUNCHES = 15  # about, where pairs of experts are grouped by the library


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
        self._launches = Launches(partial(torch.cuda.current_stream, index))
        self._attention = CudaAttention(self.torch_device, dtype, sizes, kernels, self._launches, self.upload)
        num_processors = torch.cuda.get_device_properties(self.torch_device).multi_processor_count
        self._linear_workspace = gpu.LinearWorkspace.empty(num_processors, self.torch_device)
        self.stream: torch.cuda.Stream | None = None  # of all its work; None: any

    def use(self) -> None:
        """See Device."""
        torch.cuda.set_device(self.torch_device)

    def capturing(self) -> AbstractContextManager[None]:
        """Return a context for a captured step and its trial run, in which launches cost the host nothing.

        Matrix products are computed in parts, since the step may share the device.
        """
        return self._launches.capturing()

    def shared(self) -> AbstractContextManager[None]:
        """See Device. Matrix products and attention are computed in parts, without cuDNN's long kernels."""
        return self._launches.shared()

    def next_batch(self) -> None:
        """See Device."""
        self._launches.next_batch()

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
        return self._launches.calling(meanwhile)

    def keep_memory(self, num_bytes: int) -> None:
        """See Device. The driver may wait for the device before it gives memory.

        Then the device may be in a step that waits for another process, whose driver waits in the same way.
        """
        num_free, _ = torch.cuda.mem_get_info()
        torch.empty(min(num_bytes, num_free // 2), dtype=torch.uint8, device=self.torch_device)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See Device. The kernel for few rows is faster, except when the host must launch it."""
        if self._launches.are_captured and gpu.is_faster(x, weight):
            out = x.new_empty(len(x), len(weight))
            gpu.linear(x, weight, bias, workspace=self._linear_workspace, out=out)
            return out
        if self._launches.are_captured or self._launches.is_shared:
            return self._linear_in_parts(x, weight, bias)
        self._launches.add(1)
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

    def choose_experts(
        self, logits: Tensor, num_chosen: int, *, is_normalized: bool
    ) -> tuple[Tensor, Tensor]:
        """See Device."""
        chosen, weights = empty_choice(logits, num_chosen)
        gpu.choose_experts(logits, is_normalized=is_normalized, chosen=chosen, weights=weights)
        self._launches.add(1)
        return chosen, weights

    def group_pairs(self, chosen: Tensor, num_experts: int) -> ExpertGroups:
        """See Device."""
        if chosen.numel() > gpu.MOST_PAIRS:
            self._launches.add(_GROUPING_LAUNCHES)
            return ExpertGroups.of(chosen, num_experts)
        self._launches.add(1)
        return gpu.group_pairs(chosen, num_experts)

    def grouped_linear(self, x: Tensor, weight: Tensor, groups: ExpertGroups) -> Tensor:
        """See Device."""
        out = x.new_empty(len(groups.pairs), weight.shape[1])
        gpu.grouped_linear(x, weight, groups, out=out)
        self._launches.add(1)
        return out

    def fp8_linear(self, x: Tensor, weight: Fp8Matrix, groups: ExpertGroups | None = None) -> Tensor:
        """See Device."""
        self._launches.add(2)
        return fp8_product(x, weight, groups, gpu.quantize_rows, gpu.fp8_linear, self._few_fp8)

    def expert_sum(self, parts: Tensor, weights: Tensor, *, out: Tensor) -> None:
        """See Device."""
        gpu.expert_sum(parts, weights, out=out)

    def add_rms_norm(
        self, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor, added: Tensor | None
    ) -> None:
        """See Device."""
        gpu.add_rms_norm(residual, weight, eps, out=out, added=added)
        self._launches.add(_OTHER_LAUNCHES)

    def activate_and_mul(self, gate_up: Tensor, activation: Activation, *, out: Tensor) -> None:
        """See Device."""
        gpu.activate_and_mul(gate_up, activation, out=out)

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
        """See Device. Bytes are copied by words."""
        if source.dtype == torch.uint8:
            source, target = source.view(torch.int64), target.view(torch.int64)
        gpu.copy_rows(source, target, source_rows=source_rows, target_rows=target_rows, num_rows=num_rows)

    def merge_into(self, total: Partial, parts: Partial, rows: Tensor) -> None:
        """See Device."""
        gpu.merge_into(total, parts, rows)

    def attend_slots(self, q: Tensor, kv: Tensor, lists: SlotLists, *, scale: float, out: Partial) -> None:
        """See Device."""
        self._attention.attend_slots(q, kv, lists, scale=scale, out=out)

    def attend_shared(
        self, q: Tensor, kv: Tensor, table: SharedTable, *, scale: float, total: Partial
    ) -> None:
        """See Device."""
        self._attention.attend_shared(q, kv, table, scale=scale, total=total)

    def add_sinks(self, total: Partial, sinks: Tensor) -> None:
        """See Device."""
        gpu.add_sinks(total, sinks)

    def table(self, tasks: Sequence[AttendTask], window: int | None = None) -> AttendTable:
        """See Device."""
        return self._attention.table(tasks, window)

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
        self._attention.attend_blocks(q, kv, table, scale=scale, total=total, slots=slots)

    def plan_attention(self, q: Tensor, kv: Tensor, windows: Sequence[int | None] = (None,)) -> None:
        """See Device."""
        self._attention.plan(q, kv, windows, self.use)

    def _few_fp8(
        self, values: Tensor, scales: Tensor, weight: Fp8Matrix, dtype: torch.dtype
    ) -> Tensor | None:
        """Return the product [M, N] of few rows [M, K] in FP8, or None if no kernel takes them."""
        if not gpu.is_faster(values, weight.values):
            return None
        out = values.new_empty(len(values), len(weight.values), dtype=dtype)
        both = gpu.Scales(scales, weight.scales)
        gpu.linear(values, weight.values, None, workspace=self._linear_workspace, out=out, scales=both)
        return out

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
                self._launches.add(1)
        return out


def _numbers_of_rows(most: int) -> Iterator[int]:
    """Yield numbers up to `most`, so close that a product of another number mostly has the kernel of one."""
    yield from (number for number in (1, 2, 4) if number <= most)
    yield from range(8, min(most, SHORT_ROWS) + 1, 8)
    yield from range(SHORT_ROWS + 64, most + 1, 64)


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
