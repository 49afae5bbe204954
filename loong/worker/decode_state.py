"""What captured decode steps read and change: memory taken once, and filled when a lease begins."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from loong.core.placement import InstanceId
from loong.core.request import SamplingParams, TokenId
from loong.kernels.draw_params import DrawParams
from loong.worker.draw import draw_params

GROUP_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # tokens of a master in a step of a group
BATCH_SIZES = (*GROUP_SIZES[:-1], 160, 192, 256, 320, 384, 512)  # of an instance alone
_MAX_SIZE = BATCH_SIZES[-1]
_NUM_COLUMNS = 3 + len(DrawParams._fields)


Pieces: TypeAlias = tuple[Tensor, ...]  # slots [n] int64, on the host, one piece after the other


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One request as a lease begins, at its master: `token_id` is at `position`, behind all KV there is.

    `held` and `free` are the slots here of its KV, and of tokens it may yet compute.
    """

    token_id: TokenId
    position: int
    held: Pieces
    free: Pieces
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """A lease as it begins on one instance.

    `rows` are the requests whose master it is. `served` has, for each other member, the slots that its
    requests have here, in the order of its rows.
    """

    instance_id: InstanceId
    rows: Sequence[DecodeRow]
    served: Mapping[InstanceId, Sequence[Pieces]]

    @property
    def num_tokens(self) -> Mapping[InstanceId, int]:
        """The tokens of each member in a step."""
        return {self.instance_id: len(self.rows), **{i: len(lists) for i, lists in self.served.items()}}

    @property
    def size(self) -> int:
        """The least batch size that has room for the tokens of any member."""
        largest = max(self.num_tokens.values())
        return next(size for size in (GROUP_SIZES if self.served else BATCH_SIZES) if size >= largest)


class DecodeState:
    """Columns of one piece of memory, in a row's or a query's order, so that one copy fills all of them.

    Rows are the tokens of this instance, up to 512. Queries are those of all members that a step attends.
    `memory` is int64 [num_words(num_queries)].
    """

    def __init__(self, num_queries: int, memory: Tensor) -> None:
        self.memory = memory
        columns = self.memory[: _NUM_COLUMNS * _MAX_SIZE].view(_NUM_COLUMNS, _MAX_SIZE)
        self.tokens, self.positions = columns[0], columns[1]
        self.limits = columns[2]  # slots of each row's list, held and free: beyond, nothing is stored
        wide = columns.view(torch.float64)
        self.params = DrawParams(
            temperature=wide[3],
            top_k=columns[4],
            top_p=wide[5],
            min_p=wide[6],
            seed=columns[7],
            position=columns[8],
        )
        self.starts, self.num_keys = self.memory[columns.numel() :].view(2, num_queries)

    @staticmethod
    def num_words(num_queries: int) -> int:
        """The size of its memory."""
        return _NUM_COLUMNS * _MAX_SIZE + 2 * num_queries

    def fill(self, batch: DecodeBatch, first_row: int, vocab_size: int, slots: Tensor) -> int:
        """Take in a lease, on the host, whose own queries are those from `first_row` on.

        Writes all slots that `starts` tells of to `slots`, int64, and returns their number.
        """
        self.memory.zero_()
        rows = batch.rows
        positions = [row.position for row in rows]
        set_first(self.tokens, [row.token_id for row in rows])
        set_first(self.positions, positions)
        params = draw_params([row.params for row in rows], [p + 1 for p in positions], vocab_size)
        for column, values in zip(self.params, params, strict=True):
            column[: len(rows)] = values
        set_first(self.num_keys[first_row:], [_num_slots(row.held) for row in rows])
        for instance_id, lists in batch.served.items():
            set_first(self.num_keys[instance_id * batch.size :], list(map(_num_slots, lists)))
        return self.list_slots(batch, first_row, slots)

    def list_slots(self, batch: DecodeBatch, first_row: int, slots: Tensor) -> int:
        """Take in where each list of slots begins, and how long those of rows are; otherwise as `fill`."""
        limits = [_num_slots(row.held) + _num_slots(row.free) for row in batch.rows]
        set_first(self.limits, limits)
        pieces = [piece for row in batch.rows for piece in (*row.held, *row.free)]
        ends = list(accumulate(limits, initial=0))
        set_first(self.starts[first_row:], ends[:-1])
        end = ends[-1]
        for instance_id, lists in batch.served.items():
            ends = list(accumulate(map(_num_slots, lists), initial=end))
            set_first(self.starts[instance_id * batch.size :], ends[:-1])
            end = ends[-1]
            pieces += chain.from_iterable(lists)
        join(pieces, slots)
        return end


def _num_slots(pieces: Sequence[Tensor]) -> int:
    return sum(piece.numel() for piece in pieces)


def join(pieces: Sequence[Tensor], out: Tensor) -> None:
    """Write pieces [n], if any, one after the other to the first elements; torch would wake threads."""
    if pieces:
        np.concatenate([piece.numpy() for piece in pieces], out=out.numpy()[: _num_slots(pieces)])


def set_first(column: Tensor, values: Sequence[int]) -> None:
    """Write the first elements; for so few, NumPy is ten times as quick as torch."""
    column.numpy()[: len(values)] = values
