"""The tokens of each expert, for products with many weights at once."""

from typing import NamedTuple

import torch
from torch import Tensor

_BLOCKS = (16, 64, 128)  # pairs of one expert that a program takes


class ExpertGroups(NamedTuple):
    """The pairs of T tokens and C experts for each, sorted by expert. Pair C t + c is choice c of token t.

    All sizes follow from T, C and the number X of experts, so that a captured graph follows the choices. The
    pairs of an expert are cut into blocks of at most `block_size`; unused blocks name expert X.
    """

    pairs: Tensor  # [P] int64, P = T C: by expert, then in their order
    starts: Tensor  # [X + 1] int64: the place in `pairs` of the first pair of each expert
    block_size: int
    block_experts: Tensor  # [N] int64
    block_starts: Tensor  # [N] int64: the place in `pairs` of the first pair of each block

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int) -> "ExpertGroups":
        """Return the groups of the experts chosen [T, C] int64. The host reads nothing of the device."""
        by_expert, pairs = chosen.flatten().sort(stable=True)
        experts = torch.arange(num_experts + 1, device=chosen.device)
        starts = torch.searchsorted(by_expert, experts)
        block_size, most_blocks = _sizes_of(len(pairs), num_experts)
        first_blocks = torch.zeros_like(starts)
        first_blocks[1:] = ((starts.diff() + (block_size - 1)) // block_size).cumsum(0)
        blocks = torch.arange(most_blocks, device=chosen.device)
        block_experts = torch.searchsorted(first_blocks, blocks, right=True) - 1
        block_starts = starts[block_experts] + (blocks - first_blocks[block_experts]) * block_size
        return cls(pairs, starts, block_size, block_experts, block_starts)

    @classmethod
    def empty(cls, num_pairs: int, num_experts: int, device: torch.device) -> "ExpertGroups":
        """Return groups whose tensors are not written yet.

        All begin at multiples of 16 bytes: Triton compiles kernels anew for other addresses.
        """
        block_size, most_blocks = _sizes_of(num_pairs, num_experts)
        sizes = num_pairs, num_experts + 1, most_blocks, most_blocks
        room = [words for size in sizes for words in (size, size % 2)]
        pieces = torch.split(torch.empty(sum(room), dtype=torch.int64, device=device), room)
        pairs, starts, block_experts, block_starts = pieces[::2]
        return cls(pairs, starts, block_size, block_experts, block_starts)

    @property
    def num_experts(self) -> int:
        """Return X."""
        return len(self.starts) - 1


def _sizes_of(num_pairs: int, num_experts: int) -> tuple[int, int]:
    """Return the most pairs of a block, and the most blocks."""
    block_size = next((size for size in _BLOCKS if num_pairs <= size * num_experts), _BLOCKS[-1])
    return block_size, num_pairs // block_size + min(num_experts, num_pairs)
