"""The kernels for GPUs, each defined in `reference` or `reference_draw`; importing them needs Triton."""

from loong.kernels.activation import silu_and_mul
from loong.kernels.block_attention import attend_blocks
from loong.kernels.block_pieces import PieceWorkspace
from loong.kernels.draw import DrawWorkspace, draw
from loong.kernels.linear import LinearWorkspace, is_faster, linear
from loong.kernels.merging import merge_into
from loong.kernels.normalization import add_rms_norm
from loong.kernels.penalties import penalize
from loong.kernels.qkv import rotate_and_store
from loong.kernels.rows import copy_rows
from loong.kernels.split_kv import SplitWorkspace, attend_slots, best_num_cuts

__all__ = [
    "DrawWorkspace",
    "LinearWorkspace",
    "PieceWorkspace",
    "SplitWorkspace",
    "add_rms_norm",
    "attend_blocks",
    "attend_slots",
    "best_num_cuts",
    "copy_rows",
    "draw",
    "is_faster",
    "linear",
    "merge_into",
    "penalize",
    "rotate_and_store",
    "silu_and_mul",
]
