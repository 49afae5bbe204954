"""The device of a model: its kernels, and copies to it. It is chosen once, at start."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from loong.core.activation import Activation
from loong.kernels import Partial, reference
from loong.kernels.attend_task import AttendTask
from loong.kernels.expert_groups import ExpertGroups
from loong.kernels.shared_table import SharedTable
from loong.kernels.slots import SlotLists
from loong.model.quantization.fp8 import Fp8Matrix
from loong.model.quantization.product import fp8_product
from loong.model.tiles import Tile


class AttendTable(NamedTuple):
    """The tasks of one `attend_blocks`, in the device's layout. No query is in two of them in one turn."""

    turns: tuple[Tensor, ...]  # [C, 8] int64 each, attended one after another
    tiles: tuple[Tile, ...] = ()  # parts of tasks that a faster kernel computes
    is_merged: bool = False  # some query is in several tasks or tiles
    is_cut: bool = False  # consecutive keys may be cut into pieces, as keys in slots always may
    window: int | None = None  # of the layers: queries see that many positions, their own among them


class Device(Protocol):
    """A device and its kernels, which have the names and definitions of `loong.kernels.reference`.

    Work is done in the order of a thread's calls. Tensors are on the device unless stated otherwise.
    """

    @property
    def torch_device(self) -> torch.device:
        """The device of tensors."""

    def use(self) -> None:
        """Make the device usable in the calling thread. A thread calls it first."""

    def shared(self) -> AbstractContextManager[None]:
        """Return a context in which other streams get processors soon, though steps run here.

        This goes on for the batch after it, see `next_batch`.
        """

    def next_batch(self) -> None:
        """Note that the next batch of the instance itself begins.

        The device is shared for it if it was at any time since the one before began.
        """

    def upload(self, tensor: Tensor) -> Tensor:
        """Return a host tensor's copy on the device. The host may change the original at once."""

    def host_words(self, num_words: int) -> Tensor:
        """Return zeros [num_words] int64 on the host, to be kept.

        Copies from them to the device are direct.
        """

    def wait(self) -> None:
        """Return when all work of the calling thread is done."""

    def calling(self, meanwhile: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context in which `meanwhile` is called now and then while the host launches work, and
        while it waits to launch more.
        """

    def keep_memory(self, num_bytes: int) -> None:
        """Take memory for work of the calling thread's kind, as far as there is, to be reused from now on."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x [T, in] mapped to [T, out] by weight [out, in] and bias [out]."""

    def load_products(self, weight: Tensor, bias: Tensor | None, most_rows: int) -> None:
        """Load kernels of `linear` for x of at most `most_rows` rows, since loading may wait long.

        For `shared` contexts those of all such x, otherwise of most.
        """

    def choose_experts(
        self, logits: Tensor, num_chosen: int, *, is_normalized: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the likeliest experts of logits [T, X], [T, C] int64, and their shares [T, C] float32.

        `is_normalized`: the shares of each token's experts sum to 1.
        """

    def group_pairs(self, chosen: Tensor, num_experts: int) -> ExpertGroups:
        """Return the groups of the experts chosen [T, C]."""

    def grouped_linear(self, x: Tensor, weight: Tensor, groups: ExpertGroups) -> Tensor:
        """Return x [T, in] of each pair mapped to [P, out] by its expert's weight, of [X, out, in].

        x may have a row for each of the P pairs as well.
        """

    def fp8_linear(self, x: Tensor, weight: Fp8Matrix, groups: ExpertGroups | None = None) -> Tensor:
        """Return x mapped by a weight in FP8, with activations in FP8: [T, out], or of `groups` [P, out]."""

    def expert_sum(self, parts: Tensor, weights: Tensor, *, out: Tensor) -> None:
        """Write the sum over C of weights [T, C] float32 times parts [T, C, E] to out [T, E]."""

    def add_rms_norm(
        self, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor, added: Tensor | None
    ) -> None:
        """Add `added`, if given, to residual [T, E] in place, and write the norm of the sum to `out`."""

    def activate_and_mul(self, gate_up: Tensor, activation: Activation, *, out: Tensor) -> None:
        """Write the activated gates times ups of gate_up [T, 2 F] to out [T, F]."""

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
        """Finish the heads of qkv [T, H + 2 K, D]: queries to q, the rest to kv [S, 2, K, D] at rows [T]."""

    def copy_rows(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_rows: Tensor | None,
        target_rows: Tensor | None,
        num_rows: Tensor | None = None,
    ) -> None:
        """Copy `target[target_rows[t]] = source[source_rows[t]]`, rows of any shape. None: all, in order.

        Copies only the first `num_rows` [1] int64, if given.
        """

    def merge_into(self, total: Partial, parts: Partial, rows: Tensor) -> None:
        """Merge parts, out [N, T, H, D] and lse [N, T, H], into rows [T] of `total`.

        Rows below 0 are left out.
        """

    def attend_slots(self, q: Tensor, kv: Tensor, lists: SlotLists, *, scale: float, out: Partial) -> None:
        """Attend one query of each request, q [B, H, D], to the request's slots of kv [S, 2, K, D], into
        `out`.

        `out.out` may have q's dtype if nothing is merged with it.
        """

    def attend_shared(
        self, q: Tensor, kv: Tensor, table: SharedTable, *, scale: float, total: Partial
    ) -> None:
        """Merge attention of queries q [T, H, D] over slots of kv [S, 2, K, D] that several of them read into
        `total`, float32.
        """

    def add_sinks(self, total: Partial, sinks: Tensor) -> None:
        """Merge one more key into all rows of `total`: of the logits sinks [H] float32, and the value 0."""

    def plan_attention(self, q: Tensor, kv: Tensor, windows: Sequence[int | None] = (None,)) -> None:
        """Do the slow preparations of libraries for attention of queries like q [1, H, D] over rows like kv.

        `windows` are those of the layers. Called once, at start. Values are not read.
        """

    def table(self, tasks: Sequence[AttendTask], window: int | None = None) -> AttendTable:
        """Return tasks in the layout for `attend_blocks`. With a `window`, they have true positions."""

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
        """Merge attention of the table's tasks over kv [S, 2, K, D], or over its rows `slots`, into
        `total`.
        """


def empty_choice(logits: Tensor, num_chosen: int) -> tuple[Tensor, Tensor]:
    """Return experts [T, C] int64 and shares [T, C] float32 of logits [T, X], not written yet."""
    shape = len(logits), num_chosen
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)


class CpuDevice:
    """The CPU, with the reference implementations as kernels."""

    torch_device = torch.device("cpu")

    def use(self) -> None:
        """See Device."""

    def shared(self) -> AbstractContextManager[None]:
        """See Device. The system shares processors by itself."""
        return nullcontext()

    def next_batch(self) -> None:
        """See Device."""

    def upload(self, tensor: Tensor) -> Tensor:
        """See Device."""
        return tensor

    def host_words(self, num_words: int) -> Tensor:
        """See Device."""
        return torch.zeros(num_words, dtype=torch.int64, device="cpu")

    def wait(self) -> None:
        """See Device."""

    @contextmanager
    def calling(self, meanwhile: Callable[[], None]) -> Iterator[None]:
        """See Device. A processor has computed what was launched before, and launching is computing."""
        meanwhile()
        yield

    def keep_memory(self, num_bytes: int) -> None:
        """See Device. The system gives memory at any time."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See Device."""
        return F.linear(x, weight, bias)

    def load_products(self, weight: Tensor, bias: Tensor | None, most_rows: int) -> None:
        """See Device. Libraries of processors have no kernels to load."""

    def choose_experts(
        self, logits: Tensor, num_chosen: int, *, is_normalized: bool
    ) -> tuple[Tensor, Tensor]:
        """See Device."""
        chosen, weights = empty_choice(logits, num_chosen)
        reference.choose_experts(logits, is_normalized=is_normalized, chosen=chosen, weights=weights)
        return chosen, weights

    def group_pairs(self, chosen: Tensor, num_experts: int) -> ExpertGroups:
        """See Device."""
        return ExpertGroups.of(chosen, num_experts)

    def grouped_linear(self, x: Tensor, weight: Tensor, groups: ExpertGroups) -> Tensor:
        """See Device."""
        out = x.new_empty(len(groups.pairs), weight.shape[1])
        reference.grouped_linear(x, weight, groups, out=out)
        return out

    def fp8_linear(self, x: Tensor, weight: Fp8Matrix, groups: ExpertGroups | None = None) -> Tensor:
        """See Device."""
        return fp8_product(x, weight, groups, reference.quantize_rows, reference.fp8_linear)

    def expert_sum(self, parts: Tensor, weights: Tensor, *, out: Tensor) -> None:
        """See Device."""
        reference.expert_sum(parts, weights, out=out)

    def add_rms_norm(
        self, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor, added: Tensor | None
    ) -> None:
        """See Device."""
        reference.add_rms_norm(residual, weight, eps, out=out, added=added)

    def activate_and_mul(self, gate_up: Tensor, activation: Activation, *, out: Tensor) -> None:
        """See Device."""
        gate, up = gate_up.chunk(2, dim=-1)
        out.copy_(reference.activate_and_mul(gate, up, activation))

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
        reference.rotate_and_store(
            qkv, cos, sin, q=q, kv=kv, rows=rows, q_norm=q_norm, k_norm=k_norm, eps=eps
        )

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
        reference.copy_rows(
            source, target, source_rows=source_rows, target_rows=target_rows, num_rows=num_rows
        )

    def merge_into(self, total: Partial, parts: Partial, rows: Tensor) -> None:
        """See Device."""
        reference.merge_into(total, parts, rows)

    def attend_slots(self, q: Tensor, kv: Tensor, lists: SlotLists, *, scale: float, out: Partial) -> None:
        """See Device."""
        attended = reference.attend_slots(q, kv, lists, scale=scale)
        out.out.copy_(attended.out)
        out.lse.copy_(attended.lse)

    def attend_shared(
        self, q: Tensor, kv: Tensor, table: SharedTable, *, scale: float, total: Partial
    ) -> None:
        """See Device."""
        reference.attend_shared(q, kv, table, scale=scale, total=total)

    def add_sinks(self, total: Partial, sinks: Tensor) -> None:
        """See Device."""
        reference.add_sinks(total, sinks)

    def plan_attention(self, q: Tensor, kv: Tensor, windows: Sequence[int | None] = (None,)) -> None:
        """See Device."""

    def table(self, tasks: Sequence[AttendTask], window: int | None = None) -> AttendTable:
        """See Device."""
        return AttendTable((torch.tensor(tasks, dtype=torch.int64),), window=window)

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
        for tasks in table.turns:
            reference.attend_blocks(q, kv, tasks, scale=scale, total=total, slots=slots, window=table.window)
