"""The kernels for GPUs, defined in `reference` and `reference_draw`. Importing them needs Triton."""

from loong.kernels.attention.block_attention import attend_blocks
from loong.kernels.attention.block_pieces import PieceWorkspace
from loong.kernels.attention.merging import merge_into
from loong.kernels.attention.shared import attend_shared
from loong.kernels.attention.sinks import add_sinks
from loong.kernels.attention.split_kv import SplitWorkspace, attend_slots, best_num_cuts
from loong.kernels.dense.activation import activate_and_mul
from loong.kernels.dense.expert_sum import expert_sum
from loong.kernels.dense.fp8 import quantize_rows
from loong.kernels.dense.grouped_linear import fp8_linear, grouped_linear
from loong.kernels.dense.linear import LinearWorkspace, Scales, is_faster, linear
from loong.kernels.dense.normalization import add_rms_norm
from loong.kernels.dense.qkv import rotate_and_store
from loong.kernels.dense.routing import MOST_PAIRS, choose_experts, group_pairs
from loong.kernels.rows import copy_rows
from loong.kernels.sampling.draw import DrawWorkspace, draw
from loong.kernels.sampling.penalties import penalize

__all__ = [
    "MOST_PAIRS",
    "DrawWorkspace",
    "LinearWorkspace",
    "PieceWorkspace",
    "Scales",
    "SplitWorkspace",
    "activate_and_mul",
    "add_rms_norm",
    "add_sinks",
    "attend_blocks",
    "attend_shared",
    "attend_slots",
    "best_num_cuts",
    "choose_experts",
    "copy_rows",
    "draw",
    "expert_sum",
    "fp8_linear",
    "group_pairs",
    "grouped_linear",
    "is_faster",
    "linear",
    "merge_into",
    "penalize",
    "quantize_rows",
    "rotate_and_store",
]
