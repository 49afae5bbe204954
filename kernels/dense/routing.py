"""The choice of experts of each token, and the few pairs of a step by expert: a launch each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loong.kernels.chain import chain_options, follow, let_next_start
from loong.kernels.contract import Dims
from loong.kernels.expert_groups import ExpertGroups

MOST_PAIRS = 2048  # that one program sorts
_BLOCKS_AT_ONCE = 32


def choose_experts(logits: Tensor, *, is_normalized: bool, chosen: Tensor, weights: Tensor) -> None:
    """Write the likeliest experts of each token and their shares; see `reference.choose_experts`.

    Contract:
        logits [T, X], chosen [T, C] int64 and weights [T, C] float32, contiguous. C is at most X.
        Of equal experts the first comes first. A token whose shares are NaN gets the first C experts.
        Allocates nothing.
    """
    dims = Dims()
    dims.bind("logits", logits, "T X")
    dims.bind("chosen", chosen, "T C", torch.int64)
    dims.bind("weights", weights, "T C", torch.float32)
    if chosen.numel():
        _choose[(dims["T"],)](
            logits,
            chosen,
            weights,
            dims["X"],
            num_chosen=dims["C"],
            places=triton.next_power_of_2(dims["C"]),
            is_normalized=is_normalized,
            width=triton.next_power_of_2(dims["X"]),
            num_warps=1,
            **chain_options(),
        )


def group_pairs(chosen: Tensor, num_experts: int) -> ExpertGroups:
    """Return `ExpertGroups.of` the experts chosen [T, C] int64 in one launch: at most MOST_PAIRS pairs."""
    num_pairs = chosen.numel()
    if num_pairs > MOST_PAIRS:
        raise ValueError(f"one launch groups at most {MOST_PAIRS} pairs, got {num_pairs}")
    groups = ExpertGroups.empty(num_pairs, num_experts, chosen.device)
    _group[(1,)](
        chosen,
        *(groups.pairs, groups.starts, groups.block_experts, groups.block_starts),
        num_pairs,
        num_experts,
        len(groups.block_experts),
        block_size=groups.block_size,
        width=triton.next_power_of_2(max(num_pairs, 16)),
        experts=triton.next_power_of_2(num_experts + 1),
        blocks=_BLOCKS_AT_ONCE,
        num_warps=4,
        **chain_options(),
    )
    return groups


@triton.jit
def _choose(
    logits: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    num_experts: tl.tensor,
    num_chosen: tl.constexpr,
    places: tl.constexpr,
    is_normalized: tl.constexpr,
    width: tl.constexpr,
    is_chained: tl.constexpr,
) -> None:
    token, expert, place = tl.program_id(0).to(tl.int64), tl.arange(0, width), tl.arange(0, places)
    follow(is_chained)
    row = tl.load(logits + token * num_experts + expert, expert < num_experts, -float("inf")).to(tl.float32)
    share = tl.exp(row - tl.max(row, 0))
    total = tl.sum(share, 0)
    is_finite = total == total  # otherwise no share would be the largest, and no expert would be chosen
    left = tl.where(expert < num_experts, tl.where(is_finite, share / total, 0.0), -1.0)
    best, shares = tl.zeros([places], tl.int64), tl.zeros([places], tl.float32)
    for number in tl.static_range(num_chosen):
        largest = tl.max(left, 0)
        first = tl.min(tl.where(left == largest, expert, width), 0)
        best, shares = tl.where(place == number, first, best), tl.where(place == number, largest, shares)
        left = tl.where(expert == first, -1.0, left)
    if is_normalized:
        shares /= tl.sum(shares, 0)
    tl.store(chosen + token * num_chosen + place, best, place < num_chosen)
    shares = tl.where(is_finite, shares, total)
    tl.store(weights + token * num_chosen + place, shares, place < num_chosen)
    let_next_start(is_chained)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_blocks"])
def _group(
    chosen: tl.tensor,
    pairs: tl.tensor,
    starts: tl.tensor,
    block_experts: tl.tensor,
    block_starts: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    num_blocks: tl.tensor,
    block_size: tl.constexpr,
    width: tl.constexpr,
    experts: tl.constexpr,
    blocks: tl.constexpr,
    is_chained: tl.constexpr,
) -> None:
    pair, expert = tl.arange(0, width), tl.arange(0, experts)
    follow(is_chained)
    its_expert = tl.load(chosen + pair, pair < num_pairs, num_experts).to(tl.int32)
    key = tl.sort(its_expert * width + pair)  # by expert, then in their order
    tl.store(pairs + pair, (key % width).to(tl.int64), pair < num_pairs)
    counts = tl.where(expert < num_experts, tl.histogram(key // width, experts), 0)
    first = tl.cumsum(counts, 0) - counts
    tl.store(starts + expert, first.to(tl.int64), expert <= num_experts)
    its_blocks = (counts + (block_size - 1)) // block_size
    end = tl.cumsum(its_blocks, 0)
    offset = first - (end - its_blocks) * block_size  # of a block's first pair, but for the block's number
    for begin in tl.range(0, num_blocks, blocks):
        block = begin + tl.arange(0, blocks)
        is_before = (end[None, :] <= block[:, None]) & (expert < num_experts)[None, :]
        owner = tl.sum(is_before.to(tl.int32), 1)
        shift = tl.sum(tl.where(expert[None, :] == owner[:, None], offset[None, :], 0), 1)
        tl.store(block_experts + block, owner.to(tl.int64), block < num_blocks)
        tl.store(block_starts + block, (shift + block * block_size).to(tl.int64), block < num_blocks)
    let_next_start(is_chained)
