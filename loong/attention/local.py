"""Attention of some rows of queries over KV that is at hand."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from loong.attention.step import members
from loong.core.plan import QueryBlock
from loong.kernels import Partial, attend, merge

Keys = TypeVar("Keys", slice, Tensor)


@dataclass(frozen=True)
class AttendCall(Generic[Keys]):
    """Rows of queries attend KV rows; positions are None where every query sees every key."""

    queries: slice
    keys: Keys  # rows of a circulating block, or slots [S] int64 of the pool
    q_positions: Tensor | None  # [T] int64
    kv_positions: Tensor | None  # [S] int64


def attend_call(block: QueryBlock, queries: slice, keys: Keys, kv: Iterable[range]) -> AttendCall[Keys]:
    """The call for a block of queries over the KV of some positions of its request; masks only if it must."""
    ranges = tuple(kv)
    if all(positions[-1] <= block.positions[0] for positions in ranges if positions):
        return AttendCall(queries, keys, None, None)
    return AttendCall(queries, keys, members((block.positions,)), members(ranges))


def accumulate(total: Partial, q: Tensor, kv: Tensor, call: AttendCall[Keys], scale: float) -> None:
    """Merge attention of `q[call.queries]` over kv [S, 2, K, D] into the same rows of `total`, in place."""
    rows = call.queries
    part = attend(
        q[rows], kv[:, 0], kv[:, 1], scale=scale, q_positions=call.q_positions, kv_positions=call.kv_positions
    )
    out, lse = merge(Partial(total.out[rows], total.lse[rows]), part)
    total.out[rows], total.lse[rows] = out, lse
