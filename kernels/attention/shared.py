"""RelayAttention: queries of many requests attend the KV that all of them read, which is read once.

The queries of a group become rows of one matrix product, as the queries of a prompt are. So the kernel is
that of blocks of queries, on copies of the queries in the order of their groups.
"""

from torch import Tensor

from loong.kernels.attention.block_attention import attend_blocks
from loong.kernels.attention.block_pieces import PieceWorkspace
from loong.kernels.attention.merging import merge_into
from loong.kernels.partial import Partial
from loong.kernels.shared_table import SharedTable


def attend_shared(
    q: Tensor, kv: Tensor, table: SharedTable, *, scale: float, total: Partial, workspace: PieceWorkspace
) -> None:
    """Merge attention of the queries of groups to the KV of each group; see `reference.attend_shared`.

    Contract:
        q [T, H, D], each token contiguous; kv [S, 2, K, D] of q's dtype, or rows of bytes in FP8,
            contiguous. H is a multiple of K; scale is positive.
        table: rows of q, each at most once, and slots of kv (not checked).
        total: out [T, H, D] and lse [T, H], contiguous, float32; changed in the table's rows. Where lse is
            -inf, out may be uninitialized.
        workspace: overwritten.
        Accumulates in float32. Does not wait for the host.
    """
    queries = q[table.rows.clamp(min=0)].repeat(table.num_levels, 1, 1)
    part = Partial.unseen(queries, is_merged=True)
    attend_blocks(queries, kv, table.tasks, scale=scale, total=part, slots=table.slots, workspace=workspace)
    levels = (table.num_levels, len(table.rows))
    parts = Partial(part.out.view(*levels, *q.shape[1:]), part.lse.view(*levels, q.shape[1]))
    merge_into(total, parts, table.rows)
